"""Follow the controller's events: server-sent events that resume by id after a broken connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import httpx

from api.client.client import Client, Json
from api.client.problems import raise_for_problem, unreachable
from whimbrel.errors import Unreachable
from whimbrel.limits import CONNECT_TIMEOUT_S, SSE_SILENCE_S, STREAM_RETRY_S


def follow_events(
    client: Client,
    *,
    run: str = "",
    after: int | None = None,
    patience_s: float = 60.0,
    on_break: Callable[[str], None] = lambda reason: None,
) -> Iterator[Json]:
    """Yield events as they happen, each once, in order; without `after`, only new ones.

    A broken stream is opened again after the last id seen; `on_break` hears why.

    Raises:
        Unreachable: the controller did not answer for `patience_s`.
    """
    failures = 0
    broken_since: float | None = None
    while True:
        try:
            for event in _stream(client, run, after):
                failures, broken_since = 0, None
                if isinstance(event, int):
                    after = event
                elif event is not None:
                    after = event["id"]
                    yield event
        except (httpx.HTTPError, Unreachable) as error:
            reason = error if isinstance(error, Unreachable) else unreachable(client.url, error)
            now = time.monotonic()
            broken_since = now if broken_since is None else broken_since
            if now - broken_since > patience_s:
                raise reason from error
            on_break(reason.message)
        time.sleep(STREAM_RETRY_S[min(failures, len(STREAM_RETRY_S) - 1)])
        failures += 1


def _stream(client: Client, run: str, after: int | None) -> Iterator[Json | int | None]:
    """Events of one connection; first the id where it begins, and None for each sign of life."""
    headers = {"Accept": "text/event-stream"}
    if after is not None:
        headers["Last-Event-ID"] = str(after)
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=SSE_SILENCE_S)
    params = {"run": run} if run else {}
    with client.http.stream("GET", "/v1/events", params=params, headers=headers, timeout=timeout) as response:
        if not response.is_success:
            response.read()
            raise_for_problem(response)
        kind, data, last_id = "", "", 0
        for line in response.iter_lines():
            if line.startswith("id:"):
                last_id = int(line[3:])
            elif line.startswith("event:"):
                kind = line[6:].strip()
            elif line.startswith("data:"):
                data += line[5:].strip()
            elif not line:
                if kind == "ready":
                    yield last_id
                elif data:
                    yield json.loads(data)
                kind, data = "", ""
            else:
                yield None
