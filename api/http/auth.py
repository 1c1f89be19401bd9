"""Who may ask: the admin token as a bearer, or a browser's session cookie together with a matching Origin."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import Depends, Request

from api.http.session import COOKIE, same_secret, session_is_valid
from whimbrel.errors import Forbidden, Unauthorized

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class LoginNeeded(Exception):
    """A browser asked for a page without a session; it is sent to the login form."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.location = f"/login?next={quote(target, safe='/')}"


def is_loopback(host: str) -> bool:
    """Whether this address or name is the machine itself."""
    return host in _LOOPBACK or host.startswith("127.")


async def require_admin(request: Request) -> None:
    """Let a request pass that carries the admin token or a valid session.

    Raises:
        Unauthorized: neither is there, or it is wrong.
        Forbidden: a session is there, but the request was made by another site's page.
        LoginNeeded: a browser without session asks for a page.
    """
    admin_token: str = request.app.state.admin_token
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        if same_secret(given.strip(), admin_token):
            return
        raise Unauthorized(
            "The bearer token is not the controller's admin token.",
            hint="Use the token in WHIMBREL_HOME/tokens/admin of the controller, or set WHIMBREL_TOKEN.",
        )
    if session_is_valid(admin_token, request.cookies.get(COOKIE, "")):
        _check_origin(request)
        return
    if "text/html" in request.headers.get("accept", "") and request.method in _SAFE_METHODS:
        raise LoginNeeded(request.url.path)
    raise Unauthorized(
        "This needs the admin token.", hint="Send Authorization: Bearer with it, or log in at /login in a browser."
    )


async def require_admin_unless_loopback(request: Request) -> None:
    """For probes and scrapers: open to this machine, else as `require_admin`."""
    if request.client is None or not is_loopback(request.client.host):
        await require_admin(request)


def _check_origin(request: Request) -> None:
    if request.method in _SAFE_METHODS:
        return
    origin = request.headers.get("origin", "")
    if not origin or urlsplit(origin).netloc != request.headers.get("host", ""):
        raise Forbidden(
            f"A page of {origin or 'unknown origin'} may not act with this session.",
            hint="Use the dashboard's own pages, or a bearer token.",
        )


Admin = Annotated[None, Depends(require_admin)]
