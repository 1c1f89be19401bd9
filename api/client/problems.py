"""From an answer that is an error back to the exception that the controller raised."""

from __future__ import annotations

from typing import Any

import httpx

from whimbrel import errors
from whimbrel.errors import Unreachable, WhimbrelError

_BY_CODE: dict[str, type[WhimbrelError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WhimbrelError)
}
_BY_STATUS: dict[int, type[WhimbrelError]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.UsageError,
    422: errors.UsageError,
    429: errors.LimitReached,
    503: errors.Unreachable,
    504: errors.TimedOut,
}
_STANDARD = frozenset({"type", "title", "status", "code", "detail", "hint", "request_id"})


def raise_for_problem(response: httpx.Response) -> None:
    """Raise what the controller says went wrong; do nothing when the answer is a success.

    Raises:
        WhimbrelError: of the class that the problem's code names, else the one that fits the status.
    """
    if response.is_success:
        return
    body = _json_object(response)
    kind = _BY_CODE.get(str(body.get("code", ""))) or _BY_STATUS.get(response.status_code, WhimbrelError)
    message = str(body.get("detail") or f"The controller answered {response.status_code}.")
    hint = str(body.get("hint") or "")
    details = {key: value for key, value in body.items() if key not in _STANDARD and key not in {"message", "self"}}
    raise kind(message, hint=hint, **details)


def unreachable(url: str, error: httpx.HTTPError) -> Unreachable:
    """The sentence for a controller that does not answer."""
    what = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "does not answer"
    return Unreachable(
        f"The controller at {url} {what} ({error or type(error).__name__}).",
        hint="Start it with `whimbrel up`, or name another one with --server or WHIMBREL_CONTROLLER.",
    )


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
