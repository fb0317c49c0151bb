"""A live cell under load whose processes are killed: nothing is lost, run twice or answered differently.

The first cell's life is recorded at its end and replayed byte for byte, kills included.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.scheduler.recording import OutputFrame, read_frames
from shared.messages.status import CellStatus
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.idle import settled, status_at
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PAGE_SIZE = 16
REQUESTS = 24


def settings(model: Path, **changes: Any) -> SupervisorConfig:
    """A small float32 cell; the device pool holds about 700 tokens, so the load spills to host memory."""
    small: dict[str, Any] = {"device_kv_bytes": 1_100_000, "host_kv_bytes": 16 * 2**20, "threads": 1}
    small |= {"page_size": PAGE_SIZE, "dtype": "float32", "port": 0, "max_batch_tokens": 64}
    return SupervisorConfig(model=str(model), **(small | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def prompts() -> list[list[int]]:
    """Prompts over four shared documents, each with a tail of its own."""
    rng = random.Random(5)
    documents = [[rng.randrange(8, VOCAB_SIZE) for _ in range(96)] for _ in range(4)]
    return [documents[n % 4] + [rng.randrange(8, VOCAB_SIZE) for _ in range(n + 1)] for n in range(REQUESTS)]


async def idle(cell: RunningCell, workers: int) -> CellStatus:
    """Wait until nothing runs; every pool must be whole then."""

    async def status() -> CellStatus | None:
        try:
            return await status_at(cell.nats_url)
        except Exception:
            return None  # The scheduler may be restarting.

    return await settled(status, workers=workers)


def body(model: Path, prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A completion request whose tokens come back as ids."""
    common = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return common | {"return_token_ids": True, "temperature": 0} | extra


async def ask_all(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[Answer]:
    """All at once."""
    return await asyncio.gather(*(stream_answer(client, "/v1/completions", one) for one in bodies))


def bodies(model: Path, max_tokens: int) -> list[dict[str, Any]]:
    """Every other one is sampled with a seed instead of greedily."""
    return [
        body(model, prompt, max_tokens, **({"temperature": 0.8, "seed": n} if n % 2 else {}))
        for n, prompt in enumerate(prompts())
    ]


async def started(client: httpx.AsyncClient, tasks: asyncio.Task[Any], cell: RunningCell) -> None:
    """Wait until the load is really running."""
    async with asyncio.timeout(60):
        while not tasks.done() and (await status_at(cell.nats_url)).running < 4:
            await asyncio.sleep(0.005)
    assert not tasks.done(), "the load was over before anything could be killed"


async def under_fire(cell: RunningCell, model: Path, victim: str, workers: int) -> tuple[list[Answer], list[Answer]]:
    """Answers without trouble, and answers to the same requests while ``victim`` is killed."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=120, limits=limits, trust_env=False) as client:
        calm = await ask_all(client, bodies(model, 120))
        await idle(cell, workers)
        load = asyncio.create_task(ask_all(client, bodies(model, 120)))
        await started(client, load, cell)
        pid = cell.kill(victim)
        await asyncio.to_thread(cell.wait_restarted, victim, pid)
        return calm, await load


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A thermocline command."""
    return subprocess.run([sys.executable, "-m", "thermocline", *command], capture_output=True, text=True, timeout=120)


def test_a_killed_scheduler_loses_nothing_and_its_whole_life_replays(model: Path, tmp_path: Path) -> None:
    """Requests in flight finish with the same tokens, device caches stay, and the recording replays exactly."""
    recording, tampered = tmp_path / "run.tcr", tmp_path / "tampered.tcr"
    with running(settings(model)) as cell:
        before = asyncio.run(status_at(cell.nats_url))
        calm, fired = asyncio.run(under_fire(cell, model, "scheduler", workers=1))
        after = asyncio.run(idle(cell, 1))
        recorded = run("record", "--nats", cell.nats_url, "--out", str(recording))

    assert [answer.token_ids for answer in fired] == [answer.token_ids for answer in calm]
    assert all(len(answer.token_ids) == 120 for answer in fired)
    assert after.epoch > before.epoch
    # The worker never noticed: same incarnation, no loss, and every request accepted and finished once.
    assert [w.incarnation for w in after.workers] == [w.incarnation for w in before.workers]
    assert after.counters["workers_joined"] == 1
    assert after.counters["requests_accepted"] == after.counters["finished_length"] == 2 * REQUESTS
    assert after.counters["hit_tokens_device"] > 0
    assert after.counters["hit_tokens_host"] > 0
    assert recorded.returncode == 0, recorded.stderr
    _replays(recording, tampered)


def _replays(recording: Path, tampered: Path) -> None:
    exact = run("replay", str(recording), "--json")
    assert exact.returncode == 0, exact.stdout + exact.stderr
    report = json.loads(exact.stdout)
    outputs = sum(isinstance(frame, OutputFrame) for frame in read_frames(recording))
    assert report["outputs"] == outputs > 3 * REQUESTS
    assert report["difference"] is None

    whole = recording.read_bytes()
    tampered.write_bytes(whole[: len(whole) // 2])
    truncated = run("replay", str(tampered))
    assert truncated.returncode == 2, truncated.stdout
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0x10
    tampered.write_bytes(flipped)
    damaged = run("replay", str(tampered))
    assert damaged.returncode == 2
    assert "frame" in damaged.stderr


def test_a_killed_worker_s_requests_go_on_at_another(model: Path) -> None:
    """Streams have no gap, no repeat and no changed token, greedy and seeded alike."""
    with running(settings(model, workers=2)) as cell:
        calm, fired = asyncio.run(under_fire(cell, model, "worker-0", workers=2))
        after = asyncio.run(idle(cell, 2))

    assert [answer.token_ids for answer in fired] == [answer.token_ids for answer in calm]
    assert [answer.text for answer in fired] == [answer.text for answer in calm]
    assert after.counters["workers_joined"] == 3
    assert after.counters.get("requests_resumed", 0) > 0, after.counters
