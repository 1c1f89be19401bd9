"""Renders the dashboard's pages: a shell per page; what it shows is read by the page's own module from the REST API."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from whimbrel import __version__

_HERE: Final = Path(__file__).parent
STATIC_DIR: Final = _HERE / "static"

_templates = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals["release"] = __version__


def render(template: str, **values: Any) -> str:
    """The page's HTML; a value that the template names and nobody gave is an error, not an empty string."""
    return _templates.get_template(template).render(**values)


def login_html(message: str, target: str) -> str:
    """The form that exchanges the admin token for a session; `message` says why the last try failed, or is empty."""
    return render("login.html", message=message, target=target)
