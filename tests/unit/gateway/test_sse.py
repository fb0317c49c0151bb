"""Events are what SSE clients read."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from services.gateway import sse
from shared.errors import DeadlineExceeded


def test_an_error_in_a_stream_has_openais_shape() -> None:
    """It is an event like any other, with an error object."""
    assert sse.error_event(DeadlineExceeded("late")) == (
        b'data: {"error":{"message":"late","type":"timeout_error","param":null,"code":"deadline_exceeded"}}\n\n'
    )


def by_lines(stream: bytes) -> list[object]:
    """Read a stream as load generators do that take every line with text for an event."""
    lines = [line.strip() for line in stream.split(b"\n")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line]


def by_blocks(stream: bytes) -> list[object]:
    """Read a stream as clients do that look only at the beginning of what stands between blank lines."""
    return [json.loads(block[6:]) for block in stream.split(b"\n\n") if block.startswith(b"data: ")]


@pytest.mark.parametrize("framing", [sse.DATA_ONLY, sse.NAMED], ids=["data only", "named"])
@pytest.mark.parametrize("read", [by_lines, by_blocks])
def test_a_keepalive_is_nothing_to_clients_of_every_kind(
    read: Callable[[bytes], list[object]], framing: sse.Framing
) -> None:
    """Before, between and behind events, also to those that know no comments."""
    events = [sse.event(b'{"a":1}'), sse.event(b'{"a":2}')]

    stream = b"".join(framing.keepalive + event for event in events) + framing.keepalive

    assert framing.keepalive
    assert read(stream) == [{"a": 1}, {"a": 2}]
