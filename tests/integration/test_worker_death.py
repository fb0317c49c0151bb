"""A worker that is killed is given up at once, because its node's storage sees its sign of life go out."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import decode_input
from shared.messages.cell_events import WorkerLost
from tests.checkpoints import make_checkpoint
from tests.idle import status_at
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NEVER_BY_SILENCE = {"THERMOCLINE_HEARTBEAT_LOST_MS": "3600000"}


async def loss_of_killed(cell: RunningCell, name: str) -> tuple[WorkerLost, str]:
    """Kill a worker once it is a member; returns the word of its loss, and the incarnation that was killed."""
    async with asyncio.timeout(120):
        while not (workers := (await status_at(cell.nats_url)).workers):
            await asyncio.sleep(0.05)
    bus = await connect(tuple(cell.nats_url.split(",")), "test")
    try:
        behind = (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq
        cell.kill(name, signal.SIGKILL)
        async with asyncio.timeout(60):
            async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=behind + 1):
                if isinstance(found := decode_input(message.data), WorkerLost):
                    return found, workers[0].incarnation
    finally:
        await bus.close()
    raise AssertionError("the stream ended")


def test_a_killed_worker_is_lost_long_before_its_silence_counts(tmp_path: Path) -> None:
    """Silence would have to last for an hour here."""
    model = make_checkpoint("llama", tmp_path / "llama")
    settings = SupervisorConfig(
        model=str(model), port=0, threads=1, dtype="float32", device_kv_bytes=2**20, host_kv_bytes=2**22
    )
    with running(settings, environ=NEVER_BY_SILENCE) as cell:
        lost, killed = asyncio.run(loss_of_killed(cell, "worker-0"))

    assert lost == WorkerLost(worker_id="worker-0", incarnation=killed, reason="process_gone")
