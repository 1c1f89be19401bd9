"""Signed cookies and login links."""

from __future__ import annotations

from api.http.session import LoginLinks, mint_login_link, mint_session, same_secret, session_is_valid
from whimbrel.limits import LOGIN_LINK_TTL_S, SESSION_TTL_S

TOKEN = "wb_admin_secret"


def _code(now_s: float) -> str:
    return mint_login_link("http://127.0.0.1:8600/", TOKEN, now_s).partition("token=")[2]


def test_a_session_ends_with_its_time_its_token_and_any_change() -> None:
    session = mint_session(TOKEN, now_s=1000)
    assert session_is_valid(TOKEN, session, now_s=1000 + SESSION_TTL_S - 1)
    assert not session_is_valid(TOKEN, session, now_s=1000 + SESSION_TTL_S + 1)
    assert not session_is_valid("wb_admin_other", session, now_s=1001)
    until, nonce, signature = session.split(".")
    for changed in (
        f"{int(until) + 9}.{nonce}.{signature}",
        f"{until}.0.{signature}",
        f"{until}.{nonce}.",
        "",
        "..",
        "é.é.é",
    ):
        assert not session_is_valid(TOKEN, changed, now_s=1001)


def test_a_login_link_works_once_and_only_in_time() -> None:
    links = LoginLinks()
    code = _code(1000)
    assert links.redeem(TOKEN, code, now_s=1001)
    assert not links.redeem(TOKEN, code, now_s=1002)
    assert not LoginLinks().redeem(TOKEN, _code(1000), now_s=1001 + LOGIN_LINK_TTL_S)
    assert not LoginLinks().redeem("other", _code(1000), now_s=1001)


def test_a_session_is_no_login_link_and_no_link_a_session() -> None:
    code = _code(1000)
    assert not LoginLinks().redeem(TOKEN, "wb_login_" + mint_session(TOKEN, 1000), now_s=1001)
    assert not session_is_valid(TOKEN, code.removeprefix("wb_login_"), now_s=1001)


def test_no_secret_matches_nothing() -> None:
    assert not same_secret("", "")
    assert not session_is_valid("", mint_session("", 1000), now_s=1001)
