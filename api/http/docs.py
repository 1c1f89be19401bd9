"""The API's page: made from the OpenAPI document, without any script, so that it needs neither network nor vendoring."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from api.http.auth import Admin
from api.http.problem import Problem
from whimbrel import __version__

router = APIRouter(include_in_schema=False)

_SUMMARY = "Start, watch and stop RL post-training runs that survive failures."


def install_openapi(app: FastAPI) -> None:
    """Let the document describe errors as they are, and name the security scheme."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title="Whimbrel", version=__version__, summary=_SUMMARY, routes=app.routes)
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            components["securitySchemes"] = {"admin": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"admin": []}]
            for item in schema["paths"].values():
                for operation in item.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document
    app.include_router(router)


@router.get("/docs")
async def docs(request: Request, _: Admin) -> HTMLResponse:
    """Every path with its methods, parameters and answers."""
    schema = request.app.openapi()
    sections = [
        _operation(path, method, operation)
        for path, item in sorted(schema["paths"].items())
        for method, operation in item.items()
    ]
    return HTMLResponse(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Whimbrel API</title>'
        '<link rel="icon" type="image/svg+xml" href="/static/whimbrel.svg"><link rel="stylesheet" href="/static/css/base.css">'
        '<link rel="stylesheet" href="/static/css/docs.css"></head><body><main>'
        f"<h1>Whimbrel API {escape(schema['info']['version'])}</h1><p>{escape(_SUMMARY)} "
        'The machine-readable form is <a href="/openapi.json">openapi.json</a>.</p>'
        + "".join(sections)
        + "</main></body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<li><code>{escape(one['name'])}</code> ({escape(one['in'])}{', required' if one.get('required') else ''}) "
        f"{escape(one.get('description') or one.get('schema', {}).get('description') or '')}</li>"
        for one in operation.get("parameters", [])
    )
    answers = ", ".join(
        f"{escape(status)} {escape(answer.get('description', ''))}" for status, answer in operation["responses"].items()
    )
    return (
        f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
        f"<ul>{rows}</ul><p>Answers: {answers}</p></section>"
    )
