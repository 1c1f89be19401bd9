"""Event streams over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from api.client import Client, follow_events
from api.services import Services
from api.v1 import sse
from api.v1.sse import EventTail
from tests.api.support import ADMIN, spec
from whimbrel.errors import LimitReached
from whimbrel.spec import RunSpec


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    await app.state.event_tail.close()
    server.should_exit = True
    await task


@asynccontextmanager
async def _stream(url: str, headers: dict[str, str] | None = None, **params: Any) -> AsyncIterator[AsyncIterator[str]]:
    fixed = {"Authorization": f"Bearer {ADMIN}", "Accept": "text/event-stream"}
    async with (
        httpx.AsyncClient(base_url=url, headers=fixed, timeout=20) as client,
        client.stream("GET", "/v1/events", params=params, headers=headers or {}) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        async with aclosing(response.aiter_lines()) as lines:
            yield lines


async def _events(lines: AsyncIterator[str], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for line in lines:
        if line.startswith("data: {") and line != "data: {}":
            found.append(json.loads(line[6:]))
            if len(found) == count:
                return found
    raise AssertionError("the stream ended early")


async def _line(lines: AsyncIterator[str], beginning: str) -> str:
    async for line in lines:
        if line.startswith(beginning):
            return line
    raise AssertionError("the stream ended early")


async def test_a_reader_that_returns_gets_exactly_what_it_missed(services: Services, url: str) -> None:
    async with _stream(url) as lines:
        await _line(lines, "event: ready")
        for number in range(3):
            await services.events.append("tick", str(number))
        seen = await _events(lines, 3)
    for number in range(3, 6):
        await services.events.append("tick", str(number))
    async with _stream(url, headers={"Last-Event-ID": str(seen[-1]["id"])}, after=0) as lines:
        await services.events.append("tick", "6")
        seen += await _events(lines, 4)
    assert [event["message"] for event in seen] == [str(number) for number in range(7)]


async def test_a_stream_of_one_run_tells_nothing_of_others(services: Services, url: str) -> None:
    runs = [await services.runs.create(RunSpec.model_validate(spec(name))) for name in ("one", "two")]
    async with _stream(url, run="two", after=0) as lines:
        for number in range(6):
            await services.events.append("tick", str(number), run_id=runs[number % 2].id)
        seen = await _events(lines, 3)
    assert [event["message"] for event in seen] == ["1", "3", "5"]
    assert {event["run_name"] for event in seen} == {"two"}


async def test_a_silent_stream_says_that_it_lives(app: FastAPI, services: Services, url: str) -> None:
    app.state.event_tail = EventTail(services.events.last_id, heartbeat_s=0.1)
    async with _stream(url) as lines:
        for _ in range(3):
            await _line(lines, ": heartbeat")
    await app.state.event_tail.close()


async def test_streams_beyond_the_bound_are_refused(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SSE_READERS_MAX", 1)
    tail = EventTail(services.events.last_id)

    async def read(after: int, limit: int) -> tuple[list[Any], int]:
        return [], after

    first = await tail.open(0, read)
    await anext(first)
    with pytest.raises(LimitReached):
        await tail.open(0, read)
    await first.aclose()  # type: ignore[attr-defined]
    assert tail.readers == 0
    await tail.close()


@pytest.mark.parametrize("path", ["/v1/events?run=nobody", "/v1/runs/nobody/events"])
async def test_a_stream_that_cannot_begin_is_a_problem(url: str, path: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}", "Accept": "text/event-stream"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
        assert (await client.get(path)).json()["code"] == "not_found"
        wrong = await client.get("/v1/events", headers={"Last-Event-ID": "x"})
        assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid")


async def test_the_client_follows_over_a_broken_connection(app: FastAPI, services: Services, url: str) -> None:
    seen: list[str] = []
    breaks: list[str] = []
    first, done = threading.Event(), threading.Event()

    def follow() -> None:
        with Client(url, ADMIN) as client:
            for event in follow_events(client, after=0, on_break=breaks.append):
                seen.append(event["message"])
                first.set()
                if len(seen) == 4:
                    done.set()
                    return

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    await services.events.append("tick", "0")
    assert await asyncio.to_thread(first.wait, 10)
    broken = app.state.event_tail
    app.state.event_tail = EventTail(services.events.last_id)
    await broken.close()
    for number in range(1, 4):
        await services.events.append("tick", str(number))
    assert await asyncio.to_thread(done.wait, 15)
    await asyncio.to_thread(reader.join, 5)
    assert seen == ["0", "1", "2", "3"]
