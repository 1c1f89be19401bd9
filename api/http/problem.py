"""Every error as `application/problem+json` (RFC 9457), from the one exception tree."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from whimbrel.errors import Unauthorized, WhimbrelError

MEDIA_TYPE = "application/problem+json"

_HTTP_HINTS = {
    404: "See /openapi.json for the paths that exist.",
    405: "The header Allow names the methods of this path.",
}


class Problem(BaseModel):
    """The body of every error."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    hint: str = ""
    request_id: str = ""


PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "Error", "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
}
"""`responses=` of every router: any answer that is no success is a problem."""


def problem_body(status: int, code: str, detail: str, *, hint: str, request_id: str, **details: Any) -> dict[str, Any]:
    """The JSON body of a problem; `details` never replace the standard members."""
    body: dict[str, Any] = {key: _plain(value) for key, value in details.items()}
    body.update(
        type="about:blank",
        title=_title(status),
        status=status,
        code=code,
        detail=detail,
        hint=hint,
        request_id=request_id,
    )
    return body


def problem_response(request: Request, error: WhimbrelError) -> JSONResponse:
    """The answer that says what `error` says."""
    request_id = getattr(request.state, "request_id", "")
    body = problem_body(
        error.status, error.code, error.message, hint=error.hint, request_id=request_id, **error.details
    )
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
    return JSONResponse(body, status_code=error.status, media_type=MEDIA_TYPE, headers=headers)


def internal_body(request_id: str) -> dict[str, Any]:
    """The answer to an error that nobody expected; its text stays in the log."""
    return problem_body(
        500,
        "internal",
        "The controller met an unexpected error; the request may or may not have had an effect.",
        hint=f"Look for {request_id} in the controller's log.",
        request_id=request_id,
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Let every exception of a route end as a problem."""
    app.add_exception_handler(WhimbrelError, _on_whimbrel_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_whimbrel_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WhimbrelError)
    return problem_response(request, error)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    first = found[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" ({len(found) - 1} more after this one.)" if len(found) > 1 else ""
    body = problem_body(
        422,
        "invalid",
        f"{where} is wrong: {first['msg']}.{more}",
        hint="See /openapi.json for what this request takes.",
        request_id=getattr(request.state, "request_id", ""),
        errors=[{"where": ".".join(str(part) for part in one["loc"]), "message": one["msg"]} for one in found],
    )
    return JSONResponse(body, status_code=422, media_type=MEDIA_TYPE)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    detail = {
        404: f"There is nothing at {request.url.path}.",
        405: f"{request.method} is not possible at {request.url.path}.",
    }.get(status, str(error.detail))
    body = problem_body(
        status,
        _title(status).lower().replace(" ", "_").replace("-", "_"),
        detail,
        hint=_HTTP_HINTS.get(status, ""),
        request_id=getattr(request.state, "request_id", ""),
    )
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=error.headers)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
