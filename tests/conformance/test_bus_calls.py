"""Calls and their answers."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.protocol import Bus
from shared.errors import InternalError, NotFound, PayloadTooLarge, QueueFull, Unavailable
from tests.conformance.brokers import MAX_PAYLOAD, World


async def test_call_is_answered(world: World, bus: Bus) -> None:
    """A call gets its own answer, also when several are under way."""
    other = await world.connect("second")

    async def double(data: bytes) -> bytes:
        return data + data

    await other.serve("tc.rpc.worker.w.inventory", double)

    answers = await asyncio.gather(*(bus.call("tc.rpc.worker.w.inventory", str(n).encode()) for n in range(10)))

    assert answers == [str(n).encode() * 2 for n in range(10)]


async def test_call_without_a_server_is_unavailable_at_once(bus: Bus) -> None:
    """Nobody listens: no waiting for the timeout."""
    with pytest.raises(Unavailable):
        await asyncio.wait_for(bus.call("tc.rpc.nobody", b"", timeout_s=60.0), 20.0)


async def test_call_times_out(bus: Bus) -> None:
    """A server that does not answer in time is Unavailable."""
    release = asyncio.Event()

    async def never(data: bytes) -> bytes:
        await release.wait()
        return b""

    await bus.serve("tc.rpc.slow", never)

    with pytest.raises(Unavailable):
        await bus.call("tc.rpc.slow", b"", timeout_s=0.05)
    release.set()


async def test_a_server_may_answer_several_calls_at_once(bus: Bus) -> None:
    """As many as it was told to, begun in order; the next one waits for one of them to end."""
    begun: list[bytes] = []
    changed, release = asyncio.Event(), asyncio.Event()

    async def wait(data: bytes) -> bytes:
        begun.append(data)
        changed.set()
        await release.wait()
        return data

    server = await bus.serve("tc.rpc.wide", wait, at_once=2)
    calls = [asyncio.create_task(bus.call("tc.rpc.wide", bytes([n]), timeout_s=20.0)) for n in range(3)]
    async with asyncio.timeout(20):
        while len(begun) < 2:
            changed.clear()
            await changed.wait()
    await bus.flush()
    before = list(begun)
    release.set()
    answers = await asyncio.gather(*calls)
    await server.close()

    assert before == [b"\0", b"\1"]
    assert answers == [b"\0", b"\1", b"\2"]


async def test_error_of_a_call_handler_is_raised_at_the_caller(bus: Bus) -> None:
    """A typed error crosses the bus with its message and its wait; others become InternalError."""

    async def full(data: bytes) -> bytes:
        raise QueueFull("four are waiting\nalready", retry_after_ms=1500)

    async def missing(data: bytes) -> bytes:
        raise NotFound("no such request", param="request_id")

    async def broken(data: bytes) -> bytes:
        raise ZeroDivisionError("secret")

    await bus.serve("tc.rpc.full", full)
    await bus.serve("tc.rpc.missing", missing)
    await bus.serve("tc.rpc.broken", broken)

    with pytest.raises(QueueFull, match="four are waiting\nalready") as full_info:
        await bus.call("tc.rpc.full", b"")
    with pytest.raises(NotFound) as missing_info:
        await bus.call("tc.rpc.missing", b"")
    with pytest.raises(InternalError) as broken_info:
        await bus.call("tc.rpc.broken", b"")
    assert full_info.value.retry_after_ms == 1500
    assert missing_info.value.param == "request_id"
    assert "secret" not in str(broken_info.value)


async def test_answer_beyond_the_limit_is_an_error_at_the_caller(bus: Bus) -> None:
    """Nothing above max_payload travels, and the caller learns of it without waiting for its timeout."""

    async def huge(data: bytes) -> bytes:
        return b"x" * (MAX_PAYLOAD + 1)

    await bus.serve("tc.rpc.huge", huge)

    with pytest.raises(PayloadTooLarge):
        await bus.call("tc.rpc.huge", b"", timeout_s=20.0)
