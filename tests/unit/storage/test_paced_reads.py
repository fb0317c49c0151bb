"""Reads of a limited disk begin no faster than the limit, in order. Time passes only when a test says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from services.storage.core.read_budget import BURST_S, ReadBudget
from services.storage.paced_reads import PacedReads

RATE = 1000.0


@dataclass
class _Time:
    """A clock that stands still, and sleepers that wake when it is moved on."""

    now_s: float = 0.0
    sleepers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now_s + seconds, woken))
        await woken

    async def until(self, now_s: float) -> None:
        """Move on to ``now_s``, waking each sleeper at its own time."""
        await _settle()
        while due := sorted((entry for entry in self.sleepers if entry[0] <= now_s), key=lambda entry: entry[0]):
            self.sleepers.remove(due[0])
            self.now_s = max(self.now_s, due[0][0])
            if not due[0][1].done():
                due[0][1].set_result(None)
            await _settle()
        self.now_s = now_s


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _paced(time: _Time, rate: float = RATE) -> PacedReads:
    return PacedReads(rate, clock_s=lambda: time.now_s, sleep=time.sleep)


def _readers(
    reads: PacedReads, time: _Time, sizes: list[int]
) -> tuple[list[asyncio.Task[None]], list[tuple[int, float]]]:
    """Tasks that read in this order, and what they note: (reader, when it was let go)."""
    began: list[tuple[int, float]] = []

    async def read(number: int, nbytes: int) -> None:
        await reads.wait(nbytes)
        began.append((number, round(time.now_s, 6)))

    return [asyncio.create_task(read(number, nbytes)) for number, nbytes in enumerate(sizes)], began


async def test_reads_follow_one_another_at_the_limit() -> None:
    """Each begins when its bytes have had their time behind those of all before it, whatever its size."""
    time = _Time()
    _, began = _readers(_paced(time), time, [100, 300, 50])

    await time.until(10.0)

    assert began == [(0, 0.05), (1, 0.35), (2, 0.4)]


async def test_an_idle_disk_saves_up_a_moment_and_no_more() -> None:
    """After an hour without reads as many bytes are there at once as after a second."""
    time = _Time()
    reads = _paced(time)
    await time.until(3600.0)
    _, began = _readers(reads, time, [int(RATE * BURST_S), 100])

    await time.until(3601.0)

    assert began == [(0, 3600.0), (1, 3600.1)]


async def test_a_reader_that_gives_up_takes_nothing() -> None:
    """Whether it stood in line or was next, those behind it move up and keep their order."""
    time = _Time()
    tasks, began = _readers(_paced(time), time, [100, 1000, 100, 100])
    await time.until(0.06)

    tasks[2].cancel()
    await time.until(0.07)
    tasks[1].cancel()
    await time.until(10.0)

    # The one at the front gave up at 0.07; what was spent until then is the first read.
    assert began == [(0, 0.05), (3, 0.15)]
    assert [task.cancelled() for task in tasks] == [False, True, True, False]


async def test_without_a_limit_nobody_waits() -> None:
    """0 is none: reads of any size go at once."""
    time = _Time()
    _, began = _readers(_paced(time, 0), time, [10**12, 10**12])

    await _settle()

    assert began == [(0, 0.0), (1, 0.0)]


@pytest.mark.parametrize("late_s", [0.0, 0.04])
def test_timers_that_fire_late_cost_nothing(late_s: float) -> None:
    """Within the burst: the rate over many reads is the limit, not the limit and a delay for each."""
    budget, now_s = ReadBudget(RATE), 0.0
    for _ in range(100):
        due_s = budget.due_s(100, now_s)
        now_s = max(now_s, due_s + late_s)
        budget.take(due_s)

    assert now_s == pytest.approx(100 * 100 / RATE - BURST_S + late_s)


def test_asking_takes_nothing() -> None:
    """Only what is taken counts."""
    budget = ReadBudget(RATE)

    asked = [budget.due_s(500, 2.0) for _ in range(2)]

    assert asked == [2.5 - BURST_S] * 2
