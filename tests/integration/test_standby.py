"""Real schedulers of one cell: one speaks, the others stand by, and none of its deaths shows in what is said."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.scheduler.record import main as record_main
from services.scheduler.replay import main as replay_main
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode_input, decode_published
from shared.errors import CodecError
from shared.messages.cell_events import SchedulerStarted
from shared.messages.worker_plans import WorkerPlan
from tests.integration.scheduler_process import SchedulerProcess, append, decisions, folded, plan_bytes
from tests.nats_server import NatsServer
from tests.scripted_cell import ScriptedCell, scripted_cell

pytestmark = pytest.mark.integration

LEAD_MS = "5000"
"""A process that gets no turn on a busy machine keeps its lead until the test takes it."""


@pytest.fixture
def pair(nats_server: NatsServer, tmp_path: Path) -> Iterator[tuple[SchedulerProcess, SchedulerProcess]]:
    """Two schedulers that are not started yet; certainly dead at the end."""
    first, second = (SchedulerProcess(nats_server.url, tmp_path, name) for name in ("first", "second"))
    yield first, second
    first.close()
    second.close()


async def says(process: SchedulerProcess, event: str, *, times: int = 1) -> None:
    """Wait until its log, which is that of all its lives, shows an event so many times."""
    async with asyncio.timeout(60.0):
        while process.log().count(event) < times:
            await asyncio.sleep(0.02)


async def starts(bus: Bus) -> list[tuple[str, int]]:
    """Who announced which epoch, in order."""
    found = []
    async for message in bus.follow(subjects.INPUTS_STREAM, live=False):
        try:
            one = decode_input(message.data)
        except CodecError:
            continue  # The script has one of these on purpose.
        if isinstance(one, SchedulerStarted):
            found.append((one.scheduler_id, one.epoch))
    return found


async def check_plans(bus: Bus, cell: ScriptedCell) -> None:
    """The worker was told what it would have been told by one scheduler that never ended."""
    plans = [decode_published(data) for data in dict.fromkeys(await plan_bytes(bus))]
    expected = [o for outputs in cell.outputs for o in outputs if isinstance(o, WorkerPlan)]
    assert [plan.number for plan in plans] == list(range(1, len(plans) + 1))
    assert decisions(plans) == decisions(expected)


async def begun(nats_server: NatsServer, pair: tuple[SchedulerProcess, SchedulerProcess], cell: ScriptedCell) -> Bus:
    """The first is active, the second stands by, and the first 30 inputs are folded."""
    first, second = pair
    bus = await connect([nats_server.url], "test")
    first.start("--lead-ms", LEAD_MS)
    await folded(bus, 1)
    second.start("--lead-ms", LEAD_MS)
    await says(second, "standing_by")
    await folded(bus, await append(bus, cell, 0, 30))
    return bus


async def test_a_standby_goes_on_where_the_other_froze_died_or_stopped(
    nats_server: NatsServer, pair: tuple[SchedulerProcess, SchedulerProcess], tmp_path: Path
) -> None:
    """SIGSTOP, SIGKILL and a graceful stop of whoever speaks, each with inputs behind: the other takes over, what wakes
    or starts again stands by, and what it still had to say changes nothing. All of it replays.
    """
    first, second = pair
    cell = scripted_cell(40)
    bus = await begun(nats_server, pair, cell)
    first.signal(signal.SIGSTOP)
    replaced = await folded(bus, await append(bus, cell, 30, 50))
    first.signal(signal.SIGCONT)
    await says(first, "superseded")
    still = await folded(bus, await append(bus, cell, 50, 70))
    second.end(signal.SIGKILL)
    back = await folded(bus, await append(bus, cell, 70, 90))
    second.start("--lead-ms", LEAD_MS)
    await says(second, "standing_by", times=2)
    code = first.end(signal.SIGTERM)
    status = await folded(bus, await append(bus, cell, 90, len(cell.messages)))

    assert [(each.scheduler_id, each.epoch) for each in (replaced, still)] == [("second", 2)] * 2
    assert (back.scheduler_id, back.epoch) == ("first", 3)
    assert (status.scheduler_id, status.epoch) == ("second", 4)
    assert code == 0
    assert await starts(bus) == [("first", 1), ("second", 2), ("first", 3), ("second", 4)]
    assert status.counters["requests_accepted"] == 40
    await check_plans(bus, cell)
    path = tmp_path / "day.tcrec"
    assert await asyncio.to_thread(record_main, ["--out", str(path), "--nats", nats_server.url]) == 0
    assert replay_main([str(path)]) == 0
    await bus.close()
