"""A real scheduler process in the middle of its work: its broker dies, and it is killed and started again."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.scheduler.record import main as record_main
from services.scheduler.replay import main as replay_main
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode_published
from shared.messages.status import CellStatus
from shared.messages.worker_plans import WorkerPlan
from tests.integration.scheduler_process import (
    SchedulerProcess,
    append,
    decisions,
    folded,
    plan_bytes,
    snapshot_taken,
)
from tests.nats_server import NatsServer
from tests.scripted_cell import scripted_cell

pytestmark = pytest.mark.integration


@pytest.fixture
def scheduler(nats_server: NatsServer, tmp_path: Path) -> Iterator[SchedulerProcess]:
    """Not started yet; certainly dead at the end."""
    process = SchedulerProcess(nats_server.url, tmp_path)
    yield process
    process.close()


async def test_a_scheduler_continues_with_the_same_numbers_and_loses_nothing(
    nats_server: NatsServer, scheduler: SchedulerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It outlives its broker, then SIGKILL twice, with inputs while nobody runs: plans are those of one uninterrupted
    life, and it all replays.
    """
    cell = scripted_cell(40)
    bus = await connect([nats_server.url], "test")
    scheduler.start()
    await folded(bus, 1)
    await folded(bus, await append(bus, cell, 0, 15))
    nats_server.kill()
    nats_server.start()
    outlived = await folded(bus, await append(bus, cell, 15, 30))
    scheduler.end(signal.SIGKILL)
    before = await plan_bytes(bus)
    await append(bus, cell, 30, 50)
    scheduler.start()
    await folded(bus, await append(bus, cell, 50, 70))
    taken = await snapshot_taken(bus)
    await append(bus, cell, 70, 90)
    scheduler.end(signal.SIGKILL)
    scheduler.start()
    last = await append(bus, cell, 90, len(cell.messages))
    status = await folded(bus, last)
    plans = [decode_published(data) for data in dict.fromkeys(await plan_bytes(bus))]
    expected = [o for outputs in cell.outputs for o in outputs if isinstance(o, WorkerPlan)]
    path = tmp_path / "day.tcrec"
    recorded = await asyncio.to_thread(record_main, ["--out", str(path), "--nats", nats_server.url])
    code = scheduler.end(signal.SIGTERM)
    await bus.close()
    capsys.readouterr()
    replayed = replay_main([str(path)])

    assert outlived.epoch == 1
    assert before
    assert taken.seq > 50
    assert [plan.number for plan in plans] == list(range(1, len(plans) + 1))
    # Sequences, epochs and times differ from the uninterrupted script; what was decided does not.
    assert decisions(plans) == decisions(expected)
    assert status.counters["requests_accepted"] == 40
    assert status.epoch == 3
    assert (recorded, replayed) == (0, 0), capsys.readouterr().out
    assert code == 0


async def test_a_broker_that_comes_back_empty_gets_new_streams(
    nats_server: NatsServer, scheduler: SchedulerProcess
) -> None:
    """The cell begins again under a higher epoch, in the same process."""
    cell = scripted_cell(4)
    bus = await connect([nats_server.url], "test")
    scheduler.start()
    before = await folded(bus, await append(bus, cell, 0, len(cell.messages)))
    nats_server.kill()
    shutil.rmtree(nats_server.store)
    nats_server.start()
    after = await status_of_epoch(bus, before.epoch + 1)
    again = await folded(bus, await append(bus, cell, 0, len(cell.messages)))
    code = scheduler.end(signal.SIGTERM)
    await bus.close()

    assert (before.epoch, after.epoch, again.epoch) == (1, 2, 2)
    assert after.workers == ()
    assert again.counters["requests_accepted"] == 4
    assert code == 0


async def status_of_epoch(bus: Bus, epoch: int) -> CellStatus:
    """Wait for the status of a scheduler with this epoch at least."""
    async with asyncio.timeout(60):
        while True:
            status = await folded(bus, 0)
            if status.epoch >= epoch:
                return status
            await asyncio.sleep(0.05)
