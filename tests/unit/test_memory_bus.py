"""What the in-process bus has beyond the common guarantees: an injected clock and retention on demand."""

from __future__ import annotations

from shared.bus.protocol import StreamLimits
from tests.memory_bus import MemoryBroker


class Clock:
    """Nanoseconds that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


async def test_stream_time_is_the_injected_clock() -> None:
    """Timestamps come from the clock, and stand still where it runs backwards."""
    clock = Clock()
    bus = MemoryBroker(clock=clock).connect("test")
    await bus.ensure_streams(StreamLimits())

    for now_ns in (5_000, 4_000, 6_000):
        clock.now_ns = now_ns
        await bus.append("tc.in.cell", b"")

    assert [message.time_ns async for message in bus.follow("TC_INPUTS", live=False)] == [5_000, 5_000, 6_000]


async def test_message_id_is_forgotten_after_two_minutes() -> None:
    """Beyond the window the same id is a new message."""
    clock = Clock()
    bus = MemoryBroker(clock=clock).connect("test")
    await bus.ensure_streams(StreamLimits())

    first = await bus.append("tc.in.cell", b"", message_id="one")
    clock.now_ns += 119 * 10**9
    second = await bus.append("tc.in.cell", b"", message_id="one")
    clock.now_ns += 2 * 10**9
    third = await bus.append("tc.in.cell", b"", message_id="one")

    assert (first, second, third) == (1, 1, 2)


async def test_limits_drop_the_oldest_messages() -> None:
    """A stream keeps its newest messages within bytes and age, with their sequences."""
    clock = Clock()
    bus = MemoryBroker(clock=clock).connect("test")
    await bus.ensure_streams(StreamLimits(max_bytes=100, max_age_s=60.0))

    for _ in range(5):
        await bus.append("tc.in.cell", b"x" * 40)
    by_bytes = await bus.stream_info("TC_INPUTS")
    clock.now_ns += 61 * 10**9
    await bus.append("tc.in.cell", b"x")
    by_age = await bus.stream_info("TC_INPUTS")

    assert (by_bytes.first_seq, by_bytes.last_seq, by_bytes.nbytes) == (4, 5, 80)
    assert (by_age.first_seq, by_age.last_seq) == (6, 6)


async def test_dropped_messages_leave_a_visible_gap() -> None:
    """A reader that comes too late starts at the first stored sequence."""
    broker = MemoryBroker()
    bus = broker.connect("test")
    await bus.ensure_streams(StreamLimits())
    for _ in range(5):
        await bus.append("tc.in.cell", b"")

    broker.drop_oldest("TC_INPUTS", 3)

    assert [message.seq async for message in bus.follow("TC_INPUTS", live=False)] == [4, 5]
