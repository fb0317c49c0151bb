"""A real scheduler process, and a scripted cell around it whose plans are known."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared import subjects
from shared.bus.protocol import Bus
from shared.codec import Published, decode, encode
from shared.errors import Unavailable
from shared.messages.status import CellStatus, GetStatus, SnapshotTaken, TakeSnapshot
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from tests.scripted_cell import ScriptedCell


class SchedulerProcess:
    """``python -m services.scheduler``, or another ``program`` that takes its flags, with its log in a file."""

    def __init__(
        self, url: str, folder: Path, name: str = "scheduler", program: Sequence[str] = ("-m", "services.scheduler")
    ) -> None:
        self.name = name
        self._program = program
        self._url = url
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *self._program, "--nats", self._url, "--max-batch-tokens", "128"),
                    # On a busy machine a process may not get a turn for longer than the default.
                    *(
                        "--id",
                        self.name,
                        "--lead-ms",
                        "2000",
                        "--stream-max-age-s",
                        "1e9",
                        "--heartbeat-lost-ms",
                        "3600000",
                        *flags,
                    ),
                ],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def signal(self, number: int) -> None:
        """Send a signal and wait for nothing."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code of a process that ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout=60)

    def end(self, number: int) -> int:
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


async def snapshot_taken(bus: Bus) -> SnapshotTaken:
    """Have a live scheduler take a snapshot, which it is asked for once it answers such calls."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                return decode(
                    await bus.call(subjects.rpc("scheduler", "snapshot"), encode(TakeSnapshot())), SnapshotTaken
                )
            except Unavailable:
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
