"""Cursor pages: the cursor names the last item that was given, so that inserts neither repeat nor skip items."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import Query

from whimbrel.errors import UsageError
from whimbrel.limits import PAGE_DEFAULT, PAGE_MAX

Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="Items per page.")]
Cursor = Annotated[str, Query(max_length=200, description="`next_cursor` of the page before.")]
DEFAULT_LIMIT = PAGE_DEFAULT


def encode_cursor(key: str) -> str:
    """An opaque cursor for the item with this sort key."""
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> str | None:
    """The sort key after which the page begins; None for the first page.

    Raises:
        UsageError: it is no cursor of ours.
    """
    if not cursor:
        return None
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise _bad(cursor) from error


def decode_number_cursor(cursor: str) -> int | None:
    """The same for lists that are sorted by a number."""
    key = decode_cursor(cursor)
    if key is None:
        return None
    if not key.isdecimal() or len(key) > 18:
        raise _bad(cursor)
    return int(key)


def _bad(cursor: str) -> UsageError:
    return UsageError(f"{cursor} is no cursor of this list.", hint="Pass next_cursor of the page before, unchanged.")
