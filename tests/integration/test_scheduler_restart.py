"""A real scheduler process, killed and started again in the middle of its work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from services.scheduler.record import main as record_main
from services.scheduler.replay import main as replay_main
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import Published, decode, decode_published, encode
from shared.errors import Unavailable
from shared.messages.cell_events import SchedulerStarted
from shared.messages.status import CellStatus, GetStatus, SnapshotTaken, TakeSnapshot
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from tests.nats_server import NatsServer
from tests.scripted_cell import ScriptedCell, scripted_cell

pytestmark = pytest.mark.integration


class SchedulerProcess:
    """``python -m services.scheduler``, with its log in a file."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._log = folder / "scheduler.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.scheduler", "--nats", self._url, "--max-batch-tokens", "128"),
                    *("--stream-max-age-s", "1e9", "--heartbeat-lost-ms", "3600000", *flags),
                ],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(timeout=30)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")


@pytest.fixture
def scheduler(nats_server: NatsServer, tmp_path: Path) -> Iterator[SchedulerProcess]:
    """Not started yet; certainly dead at the end."""
    process = SchedulerProcess(nats_server.url, tmp_path)
    yield process
    process.close()


async def folded(bus: Bus, seq: int) -> CellStatus:
    """Wait until a live scheduler has folded input ``seq``."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                status = decode(await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus)
                if status.seq >= seq:
                    return status
            except Unavailable:
                pass  # It is still starting.
            await asyncio.sleep(0.05)


async def append(bus: Bus, cell: ScriptedCell, begin: int, end: int) -> int:
    """Store a part of the script; the scripted scheduler's own start is left to the real one."""
    seq = 0
    async with asyncio.timeout(60.0):
        for message in cell.messages[max(begin, 1) : end]:
            stored = False
            while not stored:
                try:
                    seq = await bus.append(message.subject, message.data, message_id=f"scripted-{message.seq}")
                    stored = True
                except Unavailable:
                    await asyncio.sleep(0.05)  # The broker is away; the same message again, as everybody does.
    return seq


async def plan_bytes(bus: Bus) -> list[bytes]:
    """The worker's plans as captured, repeats included."""
    stored = [message async for message in bus.follow(subjects.OUTPUTS_STREAM, live=False)]
    return [m.data for m in stored if m.subject == subjects.worker_output("w1")]


def decisions(plans: Sequence[Published]) -> list[object]:
    """The orders, without the time at which their request was stored."""
    orders = [plan.order for plan in plans if isinstance(plan, WorkerPlan)]
    return [
        msgspec.structs.replace(order, accepted_ns=0) if isinstance(order, AdmitRequest) else order for order in orders
    ]


async def test_killed_scheduler_continues_with_the_same_numbers_and_loses_nothing(
    nats_server: NatsServer, scheduler: SchedulerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL twice, with inputs while nobody runs: plans are those of one uninterrupted life, and it all replays."""
    cell = scripted_cell(40)
    bus = await connect([nats_server.url], "test")
    scheduler.start()
    await folded(bus, 1)
    await folded(bus, await append(bus, cell, 0, 30))
    scheduler.end(signal.SIGKILL)
    before = await plan_bytes(bus)
    await append(bus, cell, 30, 50)
    scheduler.start()
    await folded(bus, await append(bus, cell, 50, 70))
    taken = decode(await bus.call("tc.rpc.scheduler.snapshot", encode(TakeSnapshot())), SnapshotTaken)
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

    assert before
    assert taken.seq > 50
    assert [plan.number for plan in plans] == list(range(1, len(plans) + 1))
    # Sequences, epochs and times differ from the uninterrupted script; what was decided does not.
    assert decisions(plans) == decisions(expected)
    assert status.counters["requests_accepted"] == 40
    assert status.epoch == 3
    assert (recorded, replayed) == (0, 0), capsys.readouterr().out
    assert code == 0


async def test_scheduler_outlives_its_broker(nats_server: NatsServer, scheduler: SchedulerProcess) -> None:
    """The broker dies and comes back: the same process goes on, without a restart and without a missing plan."""
    cell = scripted_cell(20)
    bus = await connect([nats_server.url], "test")
    scheduler.start()
    await folded(bus, 1)
    await folded(bus, await append(bus, cell, 0, 30))
    nats_server.kill()
    nats_server.start()
    status = await folded(bus, await append(bus, cell, 30, len(cell.messages)))
    plans = [decode_published(data) for data in dict.fromkeys(await plan_bytes(bus))]
    await bus.close()

    assert status.epoch == 1
    assert status.counters["requests_accepted"] == 20
    assert [plan.number for plan in plans] == list(range(1, len(plans) + 1))
    assert len(plans) == sum(isinstance(o, WorkerPlan) for outputs in cell.outputs for o in outputs)


async def test_unknown_policy_is_refused(scheduler: SchedulerProcess) -> None:
    """A process that cannot run as asked says why and is not restarted."""
    scheduler.start("--policy", "nonsense")
    assert scheduler._process is not None
    code = await asyncio.to_thread(scheduler._process.wait, 30)

    assert code == 2
    assert "nonsense" in scheduler.log()


async def test_start_while_another_runs_fences_it(
    nats_server: NatsServer, scheduler: SchedulerProcess, tmp_path: Path
) -> None:
    """The one before stops by itself; the stream shows both starts."""
    bus = await connect([nats_server.url], "test")
    scheduler.start()
    await folded(bus, 1)
    (tmp_path / "other").mkdir()
    other = SchedulerProcess(nats_server.url, tmp_path / "other")
    other.start()
    try:
        assert scheduler._process is not None
        code = await asyncio.to_thread(scheduler._process.wait, 60)
        status = await folded(bus, 2)
    finally:
        other.close()
    stored = [message.data async for message in bus.follow(subjects.INPUTS_STREAM, live=False)]
    await bus.close()

    assert code == 2
    assert status.epoch == 2
    assert (
        sum(data == encode(SchedulerStarted(scheduler_id="scheduler", epoch=e)) for data in stored for e in (1, 2)) == 2
    )
