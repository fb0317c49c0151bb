"""A worker that is a group of two ranks, in whole cells over HTTP."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.idle import hears_of_chunks, settled, status_at
from tests.integration.decided_load import asked_until
from tests.reference import Reference
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

ANSWER_TOKENS = 200
FEW_TOKENS = 8
READY_TIMEOUT_S = 600.0


def settings(model: Path, **changes: Any) -> SupervisorConfig:
    """A small float32 cell of a group."""
    small: dict[str, Any] = {"device_kv_bytes": 4 * 2**20, "host_kv_bytes": 16 * 2**20, "threads": 1, "port": 0}
    small |= {"page_size": 16, "dtype": "float32", "tensor_parallel": 2}
    return SupervisorConfig(model=str(model), **(small | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped queries."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def prompt_of(reference: Reference, length: int, max_tokens: int, seed: int) -> list[int]:
    """A prompt to which rounding decides no token of the answer."""
    rng = random.Random(seed)
    return reference.decided(lambda: [rng.randrange(8, VOCAB_SIZE) for _ in range(length)], max_tokens, ignore_eos=True)


async def ask(cell: RunningCell, model: Path, prompt: list[int], max_tokens: int) -> Answer:
    """A greedy completion."""
    async with client_of(cell) as client:
        return await stream_answer(client, "/v1/completions", body_of(model, prompt, max_tokens))


def client_of(cell: RunningCell) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cell.base_url, timeout=300, trust_env=False)


def body_of(model: Path, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return body | {"return_token_ids": True}


def rank_1_of(worker_pid: int) -> int:
    """The process of the other rank: the worker's only child that carries out orders."""
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            arguments = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue  # No process, or one that has ended.
        if parent == str(worker_pid) and b"services.worker.parallel" in arguments:
            return int(entry.name)
    raise AssertionError(f"worker {worker_pid} has no other rank")


async def serving_worker(cell: RunningCell) -> str:
    """The worker that has the only request, once it computes."""
    async with asyncio.timeout(120):
        while True:
            status = await status_at(cell.nats_url)
            for worker in status.workers:
                if worker.running:
                    return worker.worker_id
            await asyncio.sleep(0.005)


async def kill_rank_under(cell: RunningCell, model: Path, prompt: list[int]) -> tuple[list[Answer], str, int]:
    """Answers, of which the last is under way when rank 1 of its worker is killed; the worker and its pid."""
    is_over = asyncio.Event()
    async with client_of(cell) as client:
        asking = asyncio.create_task(asked_until(client, [body_of(model, prompt, ANSWER_TOKENS)], is_over))
        victim = await serving_worker(cell)
        pid = cell.pids()[victim]
        os.kill(rank_1_of(pid), signal.SIGKILL)
        is_over.set()
        (answers,) = await asking
    return answers, victim, pid


async def saved(cell: RunningCell, model: Path, prompt: list[int]) -> Answer:
    """An answer, once the storage is there; what it leaves is saved when it is returned."""
    await hears_of_chunks(lambda: status_at(cell.nats_url), 0)
    answer = await ask(cell, model, prompt, FEW_TOKENS)
    await settled(lambda: status_at(cell.nats_url), timeout_s=READY_TIMEOUT_S)
    return answer


async def restored(cell: RunningCell, model: Path, prompt: list[int], chunks: int) -> Answer:
    """An answer of a cell that begins with so many chunks on its disk."""
    await hears_of_chunks(lambda: status_at(cell.nats_url), chunks)
    return await ask(cell, model, prompt, FEW_TOKENS)


def test_a_group_outlives_its_ranks_and_shares_disks_with_single_workers(model: Path, tmp_path: Path) -> None:
    """A rank dies under a stream: the worker comes back with all its ranks, the stream goes on with the same tokens,
    and no memory of the first incarnation stays. A single worker reads what the group saved, for chunks know nothing
    of ranks: the other way round is in ``tests/unit/worker/parallel/test_parts.py``.
    """
    reference = Reference(model)
    shared = prompt_of(reference, 200, FEW_TOKENS, seed=3)
    prompt = prompt_of(reference, 60, ANSWER_TOKENS, seed=1)
    disk = {"disk_dir": (str(tmp_path / "disk"),), "disk_kv_bytes": 64 * 2**20, "restoring": "kv"}
    with running(settings(model, **disk), ready_timeout_s=READY_TIMEOUT_S) as cell:
        computed = asyncio.run(saved(cell, model, shared))
        fired, victim, pid = asyncio.run(kill_rank_under(cell, model, prompt))
        restarted = cell.wait_restarted(victim, pid, timeout_s=READY_TIMEOUT_S)
        after = asyncio.run(settled(lambda: status_at(cell.nats_url), workers=1, timeout_s=READY_TIMEOUT_S))
        rank = rank_1_of(restarted)
        log = cell.logs(victim, 400)
        prefix = cell.shm_prefix
    # However long a busy machine takes to fetch, the answer waits for it.
    single, full = settings(model, **disk, tensor_parallel=None), {"THERMOCLINE_PREFETCH_WAIT": "full"}
    with running(single, environ=full, ready_timeout_s=READY_TIMEOUT_S) as cell:
        by_one = asyncio.run(restored(cell, model, shared, 3))

    expected = reference.greedy(shared, FEW_TOKENS, ignore_eos=True)
    assert (computed.cached_tokens, computed.token_ids) == (0, expected)
    assert by_one.disk_tokens >= 128, by_one
    assert by_one.token_ids == expected
    expected = reference.greedy(prompt, ANSWER_TOKENS, ignore_eos=True)
    assert [answer.token_ids for answer in fired] == [expected] * len(fired)
    assert after.counters.get("requests_resumed", 0) == 1, after.counters
    assert "group_lost" in log
    assert not Path(f"/proc/{rank}").exists()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
