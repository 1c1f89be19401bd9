"""Column types that mean the same on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB

BIG = BigInteger().with_variant(Integer(), "sqlite")
"""64-bit integer; SQLite numbers rows itself only when the key's type is spelt INTEGER."""

DOCUMENT = JSON().with_variant(JSONB(), "postgresql")
"""A JSON document. Assign a new object to change it: changes inside one are not noticed."""


class Moment(TypeDecorator[datetime]):
    """An instant: aware datetimes in, aware UTC datetimes out, sortable in SQL on both databases."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "a moment without time zone says nothing"
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
