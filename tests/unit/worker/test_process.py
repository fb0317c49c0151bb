"""The worker as a process of its own, against a real broker."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus, Delivery, StreamLimits
from shared.codec import decode, decode_input, encode
from shared.ids import new_id
from shared.memory import unlink_all
from shared.messages.base import unpack_int32
from shared.messages.requests import SamplingParams
from shared.messages.status import GetOutputs, Heartbeat, Outputs
from shared.messages.tokens import TokenBatch
from shared.messages.worker_events import BatchDone, RequestFinished, WorkerJoined, WorkerLeft
from shared.messages.worker_plans import Dismiss, WorkerOrder, WorkerPlan
from tests.checkpoints import make_checkpoint
from tests.nats_server import NatsServer
from tests.unit.worker.driven_executor import admit, batch, chunk

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
START_S = 90

E = TypeVar("E")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


async def spawn(*flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.worker", *flags, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


class Cell:
    """The scheduler's and a gateway's side of one worker process."""

    def __init__(self, bus: Bus, process: Process, worker_id: str, first_seq: int) -> None:
        self.bus = bus
        self.process = process
        self.worker_id = worker_id
        self.first_seq = first_seq
        self.incarnation = ""
        self.heard: list[TokenBatch] = []
        self.beats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self._number = 0

    async def hear_tokens(self, delivery: Delivery) -> None:
        self.heard.append(decode(delivery.data, TokenBatch))

    async def hear_beat(self, delivery: Delivery) -> None:
        await self.beats.put(decode(delivery.data, Heartbeat))

    async def event(self, kind: type[E]) -> E:
        """Wait for this worker's first event of a kind."""
        async with asyncio.timeout(START_S):
            async for message in self.bus.follow(
                subjects.INPUTS_STREAM, from_seq=self.first_seq, subject=subjects.worker_input(self.worker_id)
            ):
                event = decode_input(message.data)
                if isinstance(event, kind):
                    return event
        raise AssertionError("the stream ended")

    async def give(self, *orders: WorkerOrder) -> None:
        for order in orders:
            self._number += 1
            plan = WorkerPlan(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                number=self._number,
                epoch=1,
                cause=1,
                order=order,
            )
            await self.bus.publish(subjects.worker_output(self.worker_id), encode(plan))

    async def exit_code(self) -> int:
        async with asyncio.timeout(60):
            return await self.process.wait()


@asynccontextmanager
async def cell(nats_url: str, model: Path, *flags: str) -> AsyncIterator[Cell]:
    bus = await connect([nats_url], "test")
    await bus.ensure_streams(StreamLimits())
    worker_id = new_id("w")
    first_seq = (await bus.stream_info(subjects.INPUTS_STREAM)).last_seq + 1
    process = await spawn(
        "--nats", nats_url, "--id", worker_id, "--model", str(model), "--page-size", "4", "--device-pages", "64",
        "--dtype", "float32", "--threads", "1", "--shm-prefix", f"thermocline-{worker_id}",
        "--drain-timeout-ms", "0", *flags,
    )  # fmt: skip
    made = Cell(bus, process, worker_id, first_seq)
    await bus.subscribe(subjects.tokens(f"g-{worker_id}"), made.hear_tokens)
    await bus.subscribe(subjects.heartbeat("worker", worker_id), made.hear_beat)
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            unlink_all(f"thermocline-{worker_id}")
        await bus.close()


async def test_a_process_serves_and_leaves_on_sigterm(nats_url: str, checkpoint: Path) -> None:
    """It joins, beats, answers a request, says its last word and exits with 0; nothing stays in /dev/shm."""
    prompt = list(range(10, 30))
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    async with cell(nats_url, checkpoint) as made:
        joined = await made.event(WorkerJoined)
        made.incarnation = joined.incarnation
        segment = Path("/dev/shm") / joined.pool.name
        assert segment.exists()
        gateway_id = f"g-{made.worker_id}"
        await made.give(admit(prompt, range(8), gateway_id=gateway_id, params=params), batch(chunk(0, 20)))
        finished = await made.event(RequestFinished)
        async with asyncio.timeout(60):
            while (await made.beats.get()).last_plan != 2:
                pass  # Beats of before the plans were carried out.
        made.process.terminate()
        await made.event(WorkerLeft)

        assert await made.exit_code() == 0
        told = [token for sent in made.heard for item in sent.items for token in item.tokens]
    assert joined.pool.pages == 64
    assert joined.max_context == 2048
    assert told == unpack_int32(finished.output)
    assert len(told) == 5
    assert not segment.exists()


async def test_a_request_survives_the_death_of_the_broker(nats_server: NatsServer, checkpoint: Path) -> None:
    """The worker decodes on; its events are stored once and in order when the broker is back, and tokens that no
    gateway heard can be asked for. Then it is dismissed: it exits with 2, and the reason is in its log.
    """
    prompt = list(range(10, 30))
    params = SamplingParams(max_tokens=220, temperature=0, ignore_eos=True)
    async with cell(nats_server.url, checkpoint) as made:
        made.incarnation = (await made.event(WorkerJoined)).incarnation
        gateway_id = f"g-{made.worker_id}"
        await made.give(admit(prompt, range(60), gateway_id=gateway_id, params=params), batch(chunk(0, 20)))
        await made.event(BatchDone)
        nats_server.kill()
        nats_server.start()
        finished = await made.event(RequestFinished)
        question = encode(GetOutputs(request_id="r", attempt=1, index=0))
        subject = subjects.rpc("worker", "outputs", made.worker_id)
        item = decode(await made.bus.call(subject, question), Outputs).item
        await made.give(Dismiss(reason="other page size"))
        assert await made.exit_code() == 2
        assert made.process.stderr is not None
        log = (await made.process.stderr.read()).decode()
        kinds = [
            type(decode_input(message.data))
            async for message in made.bus.follow(subjects.INPUTS_STREAM, from_seq=made.first_seq, live=False)
        ]

    refusals = [json.loads(line) for line in log.splitlines() if "refused_to_start" in line]
    assert "other page size" in refusals[0]["reason"]
    assert kinds == [WorkerJoined, BatchDone, RequestFinished]
    assert item is not None
    assert list(item.tokens) == unpack_int32(finished.output)
    assert len(item.tokens) == 220
    assert item.finish == "length"


async def test_a_model_that_cannot_be_served_exits_with_2(nats_url: str, tmp_path: Path) -> None:
    """Before it has said anything to the cell."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", "architectures": ["FalconForCausalLM"]}))
    process = await spawn("--nats", nats_url, "--model", str(tmp_path))

    _, errors = await asyncio.wait_for(process.communicate(), START_S)

    assert process.returncode == 2
    assert b"refused_to_start" in errors


async def test_wrong_settings_exit_with_2_and_name_every_fault() -> None:
    """No stack trace, and no waiting for torch."""
    process = await spawn("--page-size", "-1", "--dtype", "int3")

    _, errors = await asyncio.wait_for(process.communicate(), START_S)

    assert process.returncode == 2
    for word in (b"--page-size", b"--dtype", b"--model is required"):
        assert word in errors
    assert b"Traceback" not in errors
