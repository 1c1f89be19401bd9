"""Signed values for browsers: session cookies and one-use login links. No state but the links that were used.

Both are signed with a key derived from the admin token: another admin token ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time

from whimbrel.limits import LOGIN_LINK_TTL_S, LOGIN_LINKS_KEPT, SESSION_TTL_S

COOKIE = "whimbrel_session"
LINK_PREFIX = "wb_login_"


def same_secret(given: str, expected: str) -> bool:
    """Compare in constant time; an empty expectation matches nothing."""
    return bool(expected) and hmac.compare_digest(given.encode(), expected.encode())


def mint_session(admin_token: str, now_s: float | None = None) -> str:
    """The value of a session cookie, valid for SESSION_TTL_S."""
    return _mint(admin_token, "session", SESSION_TTL_S, now_s)


def session_is_valid(admin_token: str, value: str, now_s: float | None = None) -> bool:
    return _check(admin_token, "session", value, now_s)


def mint_login_link(controller: str, admin_token: str, now_s: float | None = None) -> str:
    """A URL that logs one browser in once, within LOGIN_LINK_TTL_S; it does not reveal the admin token."""
    return f"{controller.rstrip('/')}/login?token={LINK_PREFIX}{_mint(admin_token, 'link', LOGIN_LINK_TTL_S, now_s)}"


class LoginLinks:
    """Remembers which login links were used, until they expire anyway."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()

    def redeem(self, admin_token: str, code: str, now_s: float | None = None) -> bool:
        """Whether `code` may log in; true at most once for each code."""
        now_s = time.time() if now_s is None else now_s
        value = code.removeprefix(LINK_PREFIX)
        if value == code or not _check(admin_token, "link", value, now_s):
            return False
        with self._lock:
            self._used = {used: until for used, until in self._used.items() if until > now_s}
            if value in self._used or len(self._used) >= LOGIN_LINKS_KEPT:
                return False
            self._used[value] = int(value.split(".")[0])
            return True


def _mint(admin_token: str, purpose: str, ttl_s: int, now_s: float | None) -> str:
    until = int((time.time() if now_s is None else now_s) + ttl_s)
    body = f"{until}.{secrets.token_hex(8)}"
    return f"{body}.{_sign(admin_token, purpose, body)}"


def _check(admin_token: str, purpose: str, value: str, now_s: float | None) -> bool:
    body, _, signature = value.rpartition(".")
    until, _, _ = body.partition(".")
    if not admin_token or not hmac.compare_digest(signature.encode(), _sign(admin_token, purpose, body).encode()):
        return False
    return int(until) > (time.time() if now_s is None else now_s)


def _sign(admin_token: str, purpose: str, body: str) -> str:
    key = hashlib.sha256(f"whimbrel {purpose}\n{admin_token}".encode()).digest()
    return hmac.new(key, body.encode(), hashlib.sha256).hexdigest()
