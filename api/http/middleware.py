"""What every request passes: a request id, the body limit, security headers, counting, and the last catch of errors.

Written as one plain ASGI layer, so that it sees streams and errors of every kind and buffers nothing.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.metrics import HttpMetrics
from api.http.problem import MEDIA_TYPE, internal_body, problem_body
from whimbrel.ids import new_id
from whimbrel.limits import BODY_MAX_BYTES
from whimbrel.log import get_logger

_REQUEST_ID = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")
_CSP = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'self'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class _BodyTooLarge(Exception):
    pass


class Edge:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = get_logger("api")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        began = time.monotonic()
        try:
            if exchange.declared_too_large():
                await exchange.refuse_body()
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except _BodyTooLarge:
            await exchange.refuse_body()
        except Exception:  # the last catch: the caller gets a problem, the log gets the cause
            self._log.exception("request failed", request_id=exchange.request_id, path=scope["path"])
            await exchange.answer(500, internal_body(exchange.request_id))
        finally:
            route = scope.get("route")
            self._metrics.observe(
                scope["method"], getattr(route, "path", "unmatched"), exchange.status, time.monotonic() - began
            )


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers = Headers(scope=scope)
        given = self._headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.match(given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._receive = receive
        self._send = send
        self._received_bytes = 0
        self.status = 0

    def declared_too_large(self) -> bool:
        length = self._headers.get("content-length", "0")
        return length.isdigit() and int(length) > BODY_MAX_BYTES

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received_bytes += len(message.get("body", b""))
            if self._received_bytes > BODY_MAX_BYTES:
                raise _BodyTooLarge
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if headers.get("content-type", "").startswith("text/html"):
                headers["content-security-policy"] = _CSP
                headers.setdefault("cache-control", "no-store")
        await self._send(message)

    async def refuse_body(self) -> None:
        body = problem_body(
            413,
            "body_too_large",
            f"The body is larger than {BODY_MAX_BYTES} bytes.",
            hint="Send less in one request.",
            request_id=self.request_id,
        )
        await self.answer(413, body)

    async def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send a problem, unless an answer has already begun; then the broken connection tells the caller."""
        if self.status:
            return
        data = json.dumps(body).encode()
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(data)).encode())]
        if status == 413:
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": data})
