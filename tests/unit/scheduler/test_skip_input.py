"""The operator's order to leave an input out, from the command to the decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.scheduler.skip_input import order_skip
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.codec import encode
from shared.errors import NotFound, OperatorError, Unavailable
from shared.messages.cell_events import InputSkipped, SkipInput
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.scripted_cell import submit, worker_joined
from tests.unit.scheduler.test_shell_standby import Cell
from tests.waiting import until


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.skip_input.POLL_S", 0.01)


@pytest.fixture
async def bus() -> MemoryBus:
    """A stream of one input, and no scheduler."""
    bus = MemoryBroker().connect("test")
    await bus.ensure_streams(StreamLimits())
    await bus.append("tc.in.cell", encode(submit("one", [1] * 20)))
    return bus


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    async with Cell() as made:
        yield made


async def test_a_start_obeys_the_order(cell: Cell) -> None:
    """The command waits for it, and tells what the decision says."""
    hangs = await cell.put(submit("hangs", [1] * 20))
    ordering = asyncio.create_task(order_skip(cell.bus, hangs, "it hangs", 20.0))
    await until(lambda: cell.broker.stream(subjects.INPUTS_STREAM).last_seq > hangs)

    process = await cell.active()

    assert await ordering == "it hangs"
    assert await order_skip(cell.bus, hangs, "again", 20.0) == "it hangs"
    await process.stop()


async def test_what_was_folded_is_refused_before_anything_is_stored(cell: Cell) -> None:
    """The active scheduler says how far it is."""
    process = await cell.active()
    folded = await cell.put(worker_joined())
    last = (await cell.folded(folded)).seq

    with pytest.raises(OperatorError, match=f"input {folded} was folded already"):
        await order_skip(cell.bus, folded, "too late", 1.0)

    assert cell.broker.stream(subjects.INPUTS_STREAM).last_seq == last
    await process.stop()


@pytest.mark.parametrize("seq", [0, 2])
async def test_an_input_that_is_not_there_is_refused(bus: MemoryBus, seq: int) -> None:
    """Nobody may order about what will come."""
    with pytest.raises(NotFound, match="the stream has 1 to 1"):
        await order_skip(bus, seq, "", 1.0)


async def test_without_a_scheduler_the_order_stays(bus: MemoryBus) -> None:
    """The caller is told, and a second order is the same one."""
    for _ in range(2):
        with pytest.raises(Unavailable, match="restart those that hang"):
            await order_skip(bus, 1, "it hangs", 0.0)

    orders = [m.data async for m in bus.follow(subjects.INPUTS_STREAM, subject=subjects.SKIPS, live=False)]
    assert orders == [encode(SkipInput(seq=1, reason="it hangs"))]


async def test_an_input_that_was_left_out_long_ago_needs_no_order(bus: MemoryBus) -> None:
    """What was decided is told, whether or not a scheduler runs."""
    decision = InputSkipped(seq=1, subject="tc.in.cell", kind="SubmitRequest", reason="it failed")
    await bus.append(subjects.skips_input(), encode(decision))

    assert await order_skip(bus, 1, "again", 0.0) == "it failed"
