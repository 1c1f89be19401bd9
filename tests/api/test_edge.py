"""The HTTP edge on a bare application: problems, request ids, limits, headers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from prometheus_client import CollectorRegistry, generate_latest

from api.http.metrics import HttpMetrics
from api.http.middleware import Edge
from api.http.problem import MEDIA_TYPE, install_problem_handlers
from whimbrel import errors
from whimbrel.limits import BODY_MAX_BYTES

_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WhimbrelError)]


def _application() -> tuple[FastAPI, CollectorRegistry]:
    registry = CollectorRegistry()
    app = FastAPI(docs_url=None, redoc_url=None)
    install_problem_handlers(app)
    app.add_middleware(Edge, metrics=HttpMetrics(registry))

    @app.get("/raise/{code}")
    async def fail(code: str) -> None:
        raise next(kind for kind in _KINDS if kind.code == code)("What happened.", hint="What to do.", step=7)

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("secret detail")

    @app.get("/number")
    async def number(value: int) -> int:
        return value

    @app.get("/page")
    async def page() -> HTMLResponse:
        return HTMLResponse("<p>hi</p>")

    @app.post("/body")
    async def body(request: Request) -> int:
        return len(await request.body())

    return app, registry


@pytest.fixture
async def edge() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=_application()[0])
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        yield client


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.code)
async def test_every_error_of_the_tree_is_a_problem_with_its_own_status(
    edge: httpx.AsyncClient, kind: type[errors.WhimbrelError]
) -> None:
    answer = await edge.get(f"/raise/{kind.code}")
    body = answer.json()
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert answer.status_code == body["status"] == kind.status
    assert (body["code"], body["detail"], body["hint"], body["step"]) == (kind.code, "What happened.", "What to do.", 7)
    assert body["title"]
    assert body["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("DELETE", "/page", 405), ("GET", "/number?value=x", 422), ("GET", "/broken", 500)],
)
async def test_errors_of_the_framework_and_unexpected_ones_are_problems_too(
    edge: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await edge.request(method, path)
    assert answer.status_code == answer.json()["status"] == status
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert answer.json()["code"]
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert "secret" not in answer.text


async def test_a_sane_request_id_is_kept_and_any_other_replaced(edge: httpx.AsyncClient) -> None:
    assert (await edge.get("/page", headers={"X-Request-Id": "abc-1"})).headers["x-request-id"] == "abc-1"
    for wrong in ("a b", "x" * 100, "<script>"):
        assert (await edge.get("/page", headers={"X-Request-Id": wrong})).headers["x-request-id"].startswith("req_")


async def test_a_body_over_the_limit_is_refused_declared_or_not(edge: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(BODY_MAX_BYTES // 65_536 + 2):
            yield bytes(65_536)

    declared = await edge.post("/body", content=bytes(BODY_MAX_BYTES + 1))
    streamed = await edge.post("/body", content=endless())
    assert declared.status_code == streamed.status_code == 413
    assert streamed.json()["code"] == "body_too_large"
    assert (await edge.post("/body", content=b"x" * 1000)).json() == 1000


async def test_pages_forbid_foreign_scripts_and_frames(edge: httpx.AsyncClient) -> None:
    headers = (await edge.get("/page")).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_requests_are_counted_by_route_and_unknown_paths_under_one_label() -> None:
    app, registry = _application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://edge") as client:
        for code in ("conflict", "not_found"):
            await client.get(f"/raise/{code}")
        for number in range(5):
            await client.request("BREW", f"/pot/{number}")
    text = generate_latest(registry).decode()
    assert 'whimbrel_http_requests_total{method="GET",route="/raise/{code}",status="409"} 1.0' in text
    assert 'whimbrel_http_requests_total{method="other",route="unmatched",status="404"} 5.0' in text
    assert "/pot/" not in text
