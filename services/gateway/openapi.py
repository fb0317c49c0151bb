"""The OpenAPI description, made from the schemas that decode and encode the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway.admin_key import ADMIN_HEADER, is_admin_path, is_open_to_admin
from services.gateway.boundary import GUARDED_PREFIXES
from services.gateway.error_answers import is_messages_path
from services.gateway.keys import KEY_HEADER
from services.gateway.openai_schema.errors import ErrorResponse

_SCHEMES: dict[str, Any] = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "A caller's key, where any are configured."},
    "apiKeyHeader": {"type": "apiKey", "in": "header", "name": KEY_HEADER, "description": "The same key."},
    "adminKey": {
        "type": "apiKey",
        "in": "header",
        "name": ADMIN_HEADER,
        "description": "The key of the administration.",
    },
    "adminBearer": {"type": "http", "scheme": "bearer", "description": "The same key as a bearer token."},
}

_REFERENCE = "#/components/schemas/{name}"

_described: dict[str, type[msgspec.Struct]] = {}


def describes(
    request: type[msgspec.Struct] | None,
    response: type[msgspec.Struct] | None,
    *,
    streams: type[msgspec.Struct] | Sequence[type[msgspec.Struct]] | None = None,
    errors: type[msgspec.Struct] = ErrorResponse,
    query: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the ``openapi_extra`` of an endpoint.

    ``streams``: it may also answer with server-sent events, whose data is this, or one of these. Without a ``response``
    the answer is plain text. ``errors`` is the body of every error. ``query`` describes each parameter of the query
    string; all are optional.
    """
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if response is not None:
        content = {"application/json": {"schema": _reference(response)}}
    if streams is not None:
        kinds = [streams] if isinstance(streams, type) else streams
        references = [_reference(kind) for kind in kinds]
        content["text/event-stream"] = {"schema": references[0] if len(kinds) == 1 else {"anyOf": references}}
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {
                "description": "Any error",
                "content": {"application/json": {"schema": _reference(errors)}},
            },
        }
    }
    if query:
        extra["parameters"] = [
            {"name": name, "in": "query", "required": False, "description": meaning, "schema": {"type": "string"}}
            for name, meaning in query.items()
        ]
    if request is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
    return extra


def install_openapi(app: FastAPI) -> None:
    """Make ``app`` describe itself with the schemas that :func:`describes` named."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, components = msgspec.json.schema_components(_described.values(), ref_template=_REFERENCE)
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(components)
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            description["components"]["securitySchemes"] = _SCHEMES
            for name, path in description["paths"].items():
                for operation in path.values():
                    # Errors of the framework's own validation never leave: they are translated.
                    operation["responses"].pop("422", None)
                    operation["security"] = _security_of(name)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _security_of(path: str) -> list[dict[str, list[str]]]:
    """Return security schemes for a path; any of them opens it, and an empty list admits every caller."""
    if is_admin_path(path):
        return [{"adminKey": []}, {"adminBearer": []}]
    keys: list[dict[str, list[str]]] = [{"apiKey": []}] if path.startswith(GUARDED_PREFIXES) else []
    keys += [{"apiKeyHeader": []}] if is_messages_path(path) else []
    return keys + ([{"adminKey": []}] if is_open_to_admin(path) else [])


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    _described[kind.__name__] = kind
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
