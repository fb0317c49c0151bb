"""Server-sent events, as bytes. Pure."""

from __future__ import annotations

from services.gateway.openai_schema.errors import error_body
from shared.errors import ThermoclineError

DONE = b"data: [DONE]\n\n"

KEEPALIVE = b": keep-alive\n\n"
"""A comment, which clients skip; it keeps proxies from closing a quiet stream."""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(data: bytes) -> bytes:
    """One event. ``data`` is JSON as msgspec writes it: no raw line breaks, so one data line is enough."""
    return b"data: " + data + b"\n\n"


def error_event(error: ThermoclineError) -> bytes:
    """An error in the middle of a stream, in OpenAI's shape."""
    return event(error_body(error))
