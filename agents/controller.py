"""The worker's side of the conversation with the controller: MessagePack over HTTP, every call fenced by the epoch.

Owns connections, deadlines and the translation of answers into errors; retries are the caller's decision, because
only it knows what it may do meanwhile.
"""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from whimbrel import wire
from whimbrel.errors import Fenced, Unauthorized, Unreachable, WhimbrelError
from whimbrel.limits import WORK_CALL_TIMEOUT_S
from whimbrel.wire.work import (
    BatchReply,
    BatchRequest,
    Caller,
    Incident,
    LeaseReply,
    LeaseRequest,
    Progress,
    ProgressReply,
    ReportReply,
    ReportRequest,
)

Answer = TypeVar("Answer")


class ControllerClient:
    """Calls of one worker. Thread-safe.

    Every method raises Unreachable when the controller cannot answer now, and Fenced when it knows a newer epoch.
    """

    def __init__(self, url: str, token: str, caller: Caller) -> None:
        self.caller = caller
        self._url = url.rstrip("/")
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {token}", "content-type": "application/msgpack"},
            timeout=httpx.Timeout(WORK_CALL_TIMEOUT_S, connect=2.0),
            trust_env=False,
        )

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for prompt groups to sample."""
        return self._post("/work/v1/lease", request, LeaseReply)

    def report(self, request: ReportRequest) -> ReportReply:
        """Hand in finished groups, renew the leases of unfinished ones, ask what may be forgotten."""
        return self._post("/work/v1/report", request, ReportReply)

    def batch(self, request: BatchRequest) -> BatchReply:
        """Ask for the batch of a step; the same step gets the same batch until it is committed."""
        return self._post("/work/v1/batch", request, BatchReply)

    def progress(self, progress: Progress) -> ProgressReply:
        """Say what the worker does now."""
        return self._post("/work/v1/progress", progress, ProgressReply)

    def incident(self, kind: str, message: str, **details: str | int | float | bool) -> None:
        """Have something recorded that people should know."""
        self._send("/work/v1/incident", Incident(caller=self.caller, kind=kind, message=message, details=details))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, path: str, message: Any, kind: type[Answer]) -> Answer:
        return wire.decode_message(self._send(path, message).content, kind)

    def _send(self, path: str, message: Any) -> httpx.Response:
        try:
            response = self._http.post(self._url + path, content=wire.encode_message(message))
        except httpx.HTTPError as error:
            raise Unreachable(
                f"The controller at {self._url} does not answer ({type(error).__name__}).",
                hint="It is asked again; nothing is lost meanwhile.",
            ) from error
        if response.is_success:
            return response
        raise _error_of(response)


def _error_of(response: httpx.Response) -> WhimbrelError:
    try:
        problem = msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.MsgspecError:
        problem = {}
    text = str(problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}")
    hint = str(problem.get("hint") or "")
    if problem.get("code") == Fenced.code:
        return Fenced(text, hint=hint)
    if response.status_code in (401, 403):
        return Unauthorized(text, hint=hint or "Controller and node must share one cluster token.")
    if response.status_code >= 500 or response.status_code == 429:
        return Unreachable(f"The controller cannot answer now: {text}", hint=hint)
    return WhimbrelError(f"The controller refused {response.request.url.path}: {text}", hint=hint)
