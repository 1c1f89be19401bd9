"""Who may ask."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from api.http.session import COOKIE, mint_login_link, mint_session
from tests.api.support import ADMIN

ORIGIN = "http://127.0.0.1:8600"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic d3Jvbmc="}])
async def test_every_v1_route_refuses_who_has_no_token(
    app: FastAPI, anonymous: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    paths = [
        (path, method) for path, item in app.openapi()["paths"].items() for method in item if path.startswith("/v1")
    ]
    assert len(paths) > 15
    for path, method in paths:
        url = path.replace("{version}", "1").replace("{verb}", "stop")
        answer = await anonymous.request(method.upper(), url, headers=headers)
        assert answer.status_code == 401, (method, path)
        assert answer.json()["code"] == "unauthorized"
        assert answer.json()["hint"]
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_probes_and_metrics_are_open_on_this_machine_only(app: FastAPI, anonymous: httpx.AsyncClient) -> None:
    paths = ("/healthz", "/readyz", "/metrics", "/leader", "/version")
    for path in paths:
        assert (await anonymous.get(path)).status_code == 200, path
    remote = httpx.ASGITransport(app=app, client=("10.0.0.9", 5000))
    async with httpx.AsyncClient(transport=remote, base_url="http://controller") as client:
        for path in paths:
            assert (await client.get(path)).status_code == 401, path
            assert (await client.get(path, headers={"Authorization": f"Bearer {ADMIN}"})).status_code == 200, path


async def test_a_login_sets_a_cookie_that_scripts_and_other_sites_do_not_get(anonymous: httpx.AsyncClient) -> None:
    answer = await anonymous.post("/login", data={"token": ADMIN, "next": "/runs"}, headers={"Accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert ADMIN not in cookie
    assert (await anonymous.get("/v1/runs")).status_code == 200


async def test_a_login_link_logs_in_once(anonymous: httpx.AsyncClient) -> None:
    link = mint_login_link(ORIGIN, ADMIN)
    assert (await anonymous.get(link)).status_code == 303
    assert (await anonymous.get(link)).status_code == 401


@pytest.mark.parametrize("target", ["https://evil.example", "//evil.example", "/\\evil.example", "evil"])
async def test_a_login_never_sends_the_user_to_another_site(anonymous: httpx.AsyncClient, target: str) -> None:
    answer = await anonymous.get("/login", params={"token": ADMIN, "next": target})
    assert answer.headers["location"] == "/"


async def test_a_session_changes_things_only_from_its_own_pages(anonymous: httpx.AsyncClient) -> None:
    anonymous.cookies.set(COOKIE, mint_session(ADMIN))
    for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        answer = await anonymous.post("/v1/runs/none/stop", headers=origin)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert (await anonymous.post("/v1/runs/none/stop", headers={"Origin": ORIGIN})).status_code == 404


async def test_a_browser_without_session_is_sent_to_the_form(anonymous: httpx.AsyncClient) -> None:
    answer = await anonymous.get("/docs", headers={"Accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/docs")
    form = await anonymous.get(answer.headers["location"])
    assert 'value="/docs"' in form.text
    assert "default-src 'self'" in form.headers["content-security-policy"]
    assert form.text.count("<script") == form.text.count('<script src="/static/')  # nothing inline


async def test_the_form_says_when_a_token_is_wrong_and_logout_ends_the_session(anonymous: httpx.AsyncClient) -> None:
    html = {"Accept": "text/html"}
    wrong = await anonymous.post("/login", data={"token": "no"}, headers=html)
    assert wrong.status_code == 401
    assert "does not log in" in wrong.text
    await anonymous.post("/login", data={"token": ADMIN}, headers=html)
    await anonymous.post("/logout")
    assert (await anonymous.get("/v1/runs")).status_code == 401


async def test_the_docs_page_lists_every_path_without_a_script(app: FastAPI, api: httpx.AsyncClient) -> None:
    page = await api.get("/docs")
    for path in app.openapi()["paths"]:
        assert path in page.text
    assert "<script" not in page.text
    assert "http" not in page.text.replace("https://whimbrel", "")
