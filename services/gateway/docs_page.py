"""``/docs``: the API's description as one plain page. It loads nothing and runs no script."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Thermocline: the API</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}
td{border-top:1px solid #ccc;padding:.2rem .5rem;vertical-align:top}
summary{cursor:pointer;padding:.3rem 0}</style></head><body><h1>The API</h1>
<p>For programs: <a href="openapi.json">openapi.json</a>.</p>"""

_OPENED_BY = {
    "apiKey": "an API key",
    "apiKeyHeader": "the same in a header",
    "adminKey": "the admin key",
    "adminBearer": "the admin key as a bearer token",
}


def docs_page(description: Mapping[str, Any]) -> str:
    """Return the HTML page of an OpenAPI description made by ``openapi.install_openapi``."""
    return "".join([_HEAD, *_operations(description), "</body></html>"])


def _operations(description: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            name, meaning = f"{method.upper()} {_text(path)}", _text(operation["summary"])
            yield f"<details><summary><code>{name}</code> {meaning}</summary>"
            yield from _facts(operation, description["components"]["schemas"])
            yield "</details>"


def _facts(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    names = [_OPENED_BY[name] for way in operation.get("security", ()) for name in way]
    if names:
        yield f"<p>Opened by {_text(' or '.join(names))}, where any are configured.</p>"
    for parameter in operation.get("parameters", ()):
        yield f"<p><code>{_text(parameter['name'])}</code> {_text(parameter.get('description', ''))}</p>"
    asked = _schema(operation.get("requestBody", {}).get("content", {}), schemas)
    if asked:
        yield f"<p>Body, as <code>application/json</code>:</p>{_fields(asked)}"
    answered = _schema(operation["responses"].get("200", {}).get("content", {}), schemas)
    if answered:
        yield f"<p>Answer:</p>{_fields(answered)}"


def _schema(content: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    found: Mapping[str, Any] = schemas.get(reference.rpartition("/")[2], {})
    return found


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{_text(name)}</code>{' *' if name in required else ''}</td><td>{_text(_kind(field))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    """Return a field's type in a few words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    if "anyOf" in field:
        return " | ".join(_kind(each) for each in field["anyOf"])
    kind = str(field.get("type", "anything"))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}))}"
    bounds = [f"{word} {field[name]}" for name, word in (("minimum", "from"), ("maximum", "to")) if name in field]
    return " ".join([kind, *bounds])


def _text(text: str) -> str:
    return html.escape(text, quote=True)
