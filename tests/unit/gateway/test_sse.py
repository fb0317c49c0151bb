"""Events are what SSE clients read."""

from __future__ import annotations

from services.gateway import sse
from shared.errors import DeadlineExceeded


def test_an_error_in_a_stream_has_openais_shape() -> None:
    """It is an event like any other, with an error object."""
    assert sse.error_event(DeadlineExceeded("late")) == (
        b'data: {"error":{"message":"late","type":"timeout_error","param":null,"code":"deadline_exceeded"}}\n\n'
    )


def test_keepalives_are_comments() -> None:
    """A line that begins with a colon is skipped by every client."""
    assert sse.KEEPALIVE.startswith(b":")
    assert sse.KEEPALIVE.endswith(b"\n\n")
