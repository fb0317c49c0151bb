"""Waiting for reads of host pages: as long as they take, but not for ever."""

from __future__ import annotations

import asyncio

from services.storage.page_gate import PageGate


async def test_a_write_waits_for_the_read() -> None:
    """It passes when the last of the reads before it is over."""
    gate = PageGate(wait_s=20.0)
    first, second = gate.read_ordered([1]), gate.read_ordered([2])
    passing = asyncio.create_task(gate.passed(gate.write_ordered([1, 2])))
    await asyncio.sleep(0)
    gate.read_over(first)
    await asyncio.sleep(0)
    was_done = passing.done()
    gate.read_over(second)

    assert not was_done
    assert await passing


async def test_a_write_does_not_wait_for_ever() -> None:
    """A read that does not come loses its turn."""
    gate = PageGate(wait_s=0.001)
    gate.read_ordered([1])

    assert not await gate.passed(gate.write_ordered([1]))
