"""Logging: one configuration for every process. Console lines on a terminal, JSON lines elsewhere when asked for."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure_logging(level: str = "info", *, json: bool = False) -> None:
    """Send structured log lines of this process to standard error."""
    # A plain traceback: one with local variables takes seconds to draw and would print secrets.
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    renderer: Any = structlog.processors.JSONRenderer() if json else console
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if json else _keep_exception,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str, **context: object) -> Any:
    """A structured logger; `name` is the part of Whimbrel that speaks."""
    return structlog.get_logger(part=name, **context)


def _keep_exception(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event
