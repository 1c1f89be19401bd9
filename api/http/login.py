"""Log a browser in and out: token in, cookie out."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from api.dashboard.pages import login_html
from api.http.auth import LoginNeeded
from api.http.session import COOKIE, mint_session, same_secret
from whimbrel.errors import Unauthorized
from whimbrel.limits import SESSION_TTL_S

router = APIRouter(include_in_schema=False)


def install_login(app: FastAPI) -> None:
    """Add the login pages, and send browsers without session to them."""
    app.include_router(router)
    app.add_exception_handler(LoginNeeded, _on_login_needed)


@router.get("/login")
async def login_page(request: Request, token: str = "", next: str = "/") -> Response:  # noqa: A002 - the query's name
    """The form; or, with a token or login link, the session itself."""
    if not token:
        return HTMLResponse(login_html("", _local(next)))
    return _log_in(request, token, next)


@router.post("/login")
async def login(request: Request) -> Response:
    """The form's answer."""
    form = parse_qs((await request.body()).decode("utf-8", errors="replace"))
    return _log_in(request, form.get("token", [""])[0].strip(), form.get("next", ["/"])[0])


@router.post("/logout")
async def logout() -> Response:
    """Forget the session in this browser."""
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(COOKIE)
    return response


def _log_in(request: Request, token: str, target: str) -> Response:
    state = request.app.state
    if not (same_secret(token, state.admin_token) or state.login_links.redeem(state.admin_token, token)):
        if "text/html" not in request.headers.get("accept", ""):
            raise Unauthorized(
                "This token does not log in.", hint="Use the admin token, or a login link not used before."
            )
        message = "This token does not log in: it is wrong, expired or was used before."
        return HTMLResponse(login_html(message, _local(target)), status_code=401)
    response = RedirectResponse(_local(target), status_code=303)
    response.set_cookie(
        COOKIE,
        mint_session(state.admin_token),
        max_age=SESSION_TTL_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


def _local(target: str) -> str:
    """Only a path of this site: a login link must not send a user elsewhere."""
    if target.startswith("/") and not target.startswith("//") and "\\" not in target and target.isprintable():
        return target
    return "/"


async def _on_login_needed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LoginNeeded)
    return RedirectResponse(error.location, status_code=303)
