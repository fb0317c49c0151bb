"""A live cell under load whose processes are killed: nothing is lost, run twice or answered differently.

OpenAI's client is part of the load. The cell's life is recorded at its end and replayed byte for byte, kills included.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.scheduler.record import main as record_main
from services.scheduler.recording import OutputFrame, read_frames
from services.scheduler.replay import main as replay_main
from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import decode_input
from shared.messages.cell_events import WorkerLost
from shared.messages.status import CellStatus
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.idle import settled, status_at
from tests.integration.decided_load import asked_until, decided_body, differing
from tests.reference import Reference
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE_SIZE = 16
REQUESTS = 24
WORKERS = 2
VICTIM = "worker-0"
SCHEDULERS = ("scheduler", "scheduler-1")
UNHURRIED = {"THERMOCLINE_HEARTBEAT_LOST_MS": "3600000", "THERMOCLINE_LEAD_MS": "5000"}
"""A process that gets no turn on a busy machine is not taken for dead, and keeps the lead."""
ANSWER_TOKENS = 120
OFFICIAL = 4
"""So many of the requests are asked through OpenAI's client too."""


def settings(model: Path, **changes: Any) -> SupervisorConfig:
    """A small float32 cell; the device pool holds about 700 tokens, so the load spills to host memory."""
    small: dict[str, Any] = {"device_kv_bytes": 1_100_000, "host_kv_bytes": 16 * 2**20, "threads": 1}
    small |= {"page_size": PAGE_SIZE, "dtype": "float32", "port": 0, "max_batch_tokens": 64}
    return SupervisorConfig(model=str(model), **(small | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def _prompt(documents: list[list[int]], rng: random.Random, number: int) -> list[int]:
    """One of the documents and a tail of its own, drawn anew by each call."""
    return documents[number % 4] + draw(rng, number + 1)


@pytest.fixture(scope="module")
def bodies(model: Path) -> list[dict[str, Any]]:
    """Requests over four shared documents, each with a tail of its own; every other one is sampled with a seed."""
    reference, rng = Reference(model), random.Random(5)
    documents = [draw(rng, 96) for _ in range(4)]
    return [
        decided_body(reference, model.name, partial(_prompt, documents, rng, n), ANSWER_TOKENS, is_sampled=n % 2 == 1)
        for n in range(REQUESTS)
    ]


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(count)]


async def idle(cell: RunningCell, workers: int) -> CellStatus:
    """Wait until nothing runs; every pool must be whole then."""
    return await settled(lambda: status_at(cell.nats_url), workers=workers, timeout_s=240.0)


async def ask_all(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[Answer]:
    """All at once."""
    return await asyncio.gather(*(stream_answer(client, "/v1/completions", one) for one in bodies))


async def stream_officially(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason that OpenAI's client puts together."""
    extra = {"ignore_eos": True}
    asked = {name: value for name, value in body.items() if name not in ("ignore_eos", "return_token_ids")}
    text, reason = "", ""
    async for chunk in await client.completions.create(**asked, stream=True, extra_body=extra):
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason


async def begun(load: asyncio.Task[Any], cell: RunningCell) -> None:
    """Wait until every worker has something to do. The load goes on until it is told to end."""
    async with asyncio.timeout(60):
        while not all(each.running for each in (await status_at(cell.nats_url)).workers):
            if load.done():
                load.result()
            await asyncio.sleep(0.005)


async def standing_by(cell: RunningCell) -> None:
    """Wait until one of the schedulers has folded as far as the other."""
    async with asyncio.timeout(60):
        while not any("standing_by" in cell.logs(name) for name in SCHEDULERS):
            await asyncio.sleep(0.05)


async def kill_active(cell: RunningCell) -> tuple[str, int]:
    """Kill the scheduler that is active, and wait for its successor; its name and pid."""
    status = await status_at(cell.nats_url)
    pid = cell.kill(status.scheduler_id)
    async with asyncio.timeout(60):
        while (after := await status_at(cell.nats_url)).epoch == status.epoch:
            await asyncio.sleep(0.005)
    assert after.scheduler_id != status.scheduler_id
    return status.scheduler_id, pid


async def kill_worker(cell: RunningCell) -> tuple[str, int]:
    """Kill a worker; its name and pid."""
    return VICTIM, cell.kill(VICTIM)


async def under_fire(
    cell: RunningCell, bodies: list[dict[str, Any]], *killings: Callable[[RunningCell], Awaitable[tuple[str, int]]]
) -> tuple[list[Answer], list[list[list[Answer]]], list[CellStatus]]:
    """Answers without trouble, all answers to the same requests during each killing, and the cell, idle, after each."""
    limits = httpx.Limits(max_connections=64)
    async with (
        httpx.AsyncClient(base_url=cell.base_url, timeout=120, limits=limits, trust_env=False) as client,
        # It may not retry: a stream that broke would be seen.
        openai.AsyncOpenAI(base_url=f"{cell.base_url}/v1", api_key="none", max_retries=0, timeout=240) as official,
    ):
        await standing_by(cell)
        calm = await ask_all(client, bodies)
        texts = [(answer.text, "length") for answer in calm]
        fired, idles = [], [await idle(cell, WORKERS)]
        for kill in killings:
            is_over = asyncio.Event()
            load = asyncio.create_task(asked_until(client, bodies, is_over))
            streams = asyncio.gather(*(stream_officially(official, body) for body in bodies[:OFFICIAL]))
            await begun(load, cell)
            victim, pid = await kill(cell)
            is_over.set()
            await asyncio.to_thread(cell.wait_restarted, victim, pid)
            fired.append(await load)
            assert await streams == texts[:OFFICIAL]
            idles.append(await idle(cell, WORKERS))
    return calm, fired, idles


async def losses(nats_url: str) -> list[WorkerLost]:
    """Every word of a lost worker in the stream of inputs."""
    bus = await connect(tuple(nats_url.split(",")), "test")
    try:
        found = [decode_input(each.data) async for each in bus.follow(subjects.INPUTS_STREAM, live=False)]
    finally:
        await bus.close()
    return [each for each in found if isinstance(each, WorkerLost)]


def test_a_killed_scheduler_and_a_killed_worker_lose_nothing(
    model: Path, bodies: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under load the active scheduler dies, then a worker: streams have no gap, no repeat and no changed token, greedy
    and seeded alike, OpenAI's client included. Caches stay, the dead worker is given up at once, and the cell's whole
    life replays exactly.
    """
    recording, tampered = tmp_path / "run.tcr", tmp_path / "tampered.tcr"
    config = settings(model, workers=WORKERS, schedulers=len(SCHEDULERS))
    with running(config, environ=UNHURRIED) as cell:
        calm, fired, idles = asyncio.run(under_fire(cell, bodies, kill_active, kill_worker))
        lost = asyncio.run(losses(cell.nats_url))
        recorded = record_main(["--nats", cell.nats_url, "--out", str(recording)])

    # Nobody named a folder for it, so none is left.
    assert not cell.data_dir.exists()
    before, replaced, after = idles
    assert [differing(calm, answers) for answers in fired] == [[], []]
    assert all(len(answer.token_ids) == ANSWER_TOKENS for answer in calm)
    # No worker noticed that another scheduler speaks: same incarnations, and every request accepted and finished once.
    assert (replaced.scheduler_id != before.scheduler_id, replaced.epoch) == (True, before.epoch + 1)
    assert [w.incarnation for w in replaced.workers] == [w.incarnation for w in before.workers]
    assert replaced.counters["workers_joined"] == WORKERS
    for status, rounds in ((replaced, fired[:1]), (after, fired)):
        asked = REQUESTS + sum(OFFICIAL + sum(map(len, each)) for each in rounds)
        assert status.counters["requests_accepted"] == status.counters["finished_length"] == asked
    assert replaced.counters["hit_tokens_device"] > 0
    assert replaced.counters["hit_tokens_host"] > 0
    # The storage saw the worker's sign of life go out, long before its silence would have counted.
    killed = next(worker.incarnation for worker in before.workers if worker.worker_id == VICTIM)
    assert lost == [WorkerLost(worker_id=VICTIM, incarnation=killed, reason="process_gone")]
    assert after.counters["workers_joined"] == WORKERS + 1
    assert after.counters.get("requests_resumed", 0) > 0, after.counters
    assert recorded == 0, capsys.readouterr()
    _replays(recording, tampered, capsys)


def _replays(recording: Path, tampered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert replay_main([str(recording), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    outputs = sum(isinstance(frame, OutputFrame) for frame in read_frames(recording))
    assert report["outputs"] == outputs > 3 * REQUESTS
    assert report["difference"] is None

    whole = recording.read_bytes()
    tampered.write_bytes(whole[: len(whole) // 2])
    assert replay_main([str(tampered)]) == 2
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0x10
    tampered.write_bytes(flipped)
    capsys.readouterr()
    assert replay_main([str(tampered)]) == 2
    assert "frame" in capsys.readouterr().err
