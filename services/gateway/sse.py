"""Server-sent events, as bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.openai_schema.errors import error_body
from shared.errors import ThermoclineError

DONE = b"data: [DONE]\n\n"

KEEPALIVE = b"\n\n"
"""Blank lines behind no event, which keep proxies from closing a quiet stream.

Every client skips them; of comments many load generators do not know, and end the answer with an error of JSON.
"""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(data: bytes) -> bytes:
    """Return one event. ``data`` is JSON as msgspec writes it: no raw line breaks, so one data line is enough."""
    return b"data: " + data + b"\n\n"


def error_event(error: ThermoclineError) -> bytes:
    """Return an error for the middle of a stream, in OpenAI's shape."""
    return event(error_body(error))


def named_event(name: str, data: bytes) -> bytes:
    """Return one event with a name, for APIs whose clients dispatch on it."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """The form of an API's stream: ``event`` frames one chunk, ``keepalive`` fills pauses, ``end`` follows the last.

    ``opens_at_once``: the chunks before any token are sent when the stream starts, else with the first token.
    """

    event: Callable[[bytes], bytes]
    keepalive: bytes
    end: bytes
    opens_at_once: bool = True


DATA_ONLY = Framing(event=event, keepalive=KEEPALIVE, end=DONE, opens_at_once=False)
"""OpenAI's completions and chats: events have no name, and ``[DONE]`` marks the end.

Clients that measure TTFT take the first chunk with a choice for the first token, though it has only the role.
"""

NAMED = Framing(event=bytes, keepalive=KEEPALIVE, end=b"")
"""Chunks are whole events with names already, and the API's own last event ends the stream."""
