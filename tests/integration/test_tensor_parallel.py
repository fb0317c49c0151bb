"""Workers that are groups of two ranks, in whole cells over HTTP."""

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
from tests.idle import settled, status_at
from tests.reference import Reference
from thermocline.client import Answer, stream_answer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ANSWER_TOKENS = 400
READY_TIMEOUT_S = 600.0


def settings(model: Path, **changes: Any) -> SupervisorConfig:
    """A small float32 cell of groups."""
    small: dict[str, Any] = {"device_kv_bytes": 4 * 2**20, "host_kv_bytes": 16 * 2**20, "threads": 2, "port": 0}
    small |= {"page_size": 16, "dtype": "float32", "tensor_parallel": 2}
    return SupervisorConfig(model=str(model), **(small | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped queries."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(length)]


async def ask(cell: RunningCell, model: Path, prompt: list[int], max_tokens: int) -> Answer:
    """A greedy completion."""
    body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=300, trust_env=False) as client:
        return await stream_answer(client, "/v1/completions", body | {"return_token_ids": True})


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


async def kill_rank_under(cell: RunningCell, model: Path, prompt: list[int]) -> tuple[Answer, str, int]:
    """An answer during which rank 1 of its worker is killed; the worker and its pid."""
    asking = asyncio.create_task(ask(cell, model, prompt, ANSWER_TOKENS))
    victim = await serving_worker(cell)
    pid = cell.pids()[victim]
    os.kill(rank_1_of(pid), signal.SIGKILL)
    assert not asking.done(), "the answer was over before anything could be killed"
    return await asking, victim, pid


def test_an_answer_outlives_a_rank_of_its_worker(model: Path) -> None:
    """The stream goes on at the other group with the same tokens, the worker comes back with all its ranks, and no
    memory of the first incarnation stays.
    """
    prompt = prompt_of(60, seed=1)
    with running(settings(model, workers=2), ready_timeout_s=READY_TIMEOUT_S) as cell:
        fired, victim, pid = asyncio.run(kill_rank_under(cell, model, prompt))
        restarted = cell.wait_restarted(victim, pid, timeout_s=READY_TIMEOUT_S)
        after = asyncio.run(settled(lambda: status_at(cell.nats_url), workers=2, timeout_s=READY_TIMEOUT_S))
        rank = rank_1_of(restarted)
        log = cell.logs(victim, 400)
        prefix = cell.shm_prefix

    assert len(fired.token_ids) == ANSWER_TOKENS
    expected = Reference(model).greedy(prompt, ANSWER_TOKENS)
    assert fired.token_ids[: len(expected)] == expected
    assert after.counters.get("requests_resumed", 0) == 1, after.counters
    assert "group_lost" in log
    assert not Path(f"/proc/{rank}").exists()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def test_what_a_group_saved_a_single_worker_restores_and_the_other_way_round(model: Path, tmp_path: Path) -> None:
    """Chunks on disk know nothing of ranks: a cell with another number of them reads them, with the same tokens."""
    first, second = prompt_of(200, seed=2), prompt_of(200, seed=3)
    disk = {"disk_dir": (str(tmp_path / "disk"),), "disk_kv_bytes": 64 * 2**20, "restoring": "kv"}
    reference = Reference(model)

    def served(prompts: list[list[int]], **changes: Any) -> list[Answer]:
        with running(settings(model, **disk, **changes), ready_timeout_s=READY_TIMEOUT_S) as cell:

            async def all_of_them() -> list[Answer]:
                answers = [await ask(cell, model, prompt, 8) for prompt in prompts]
                await settled(lambda: status_at(cell.nats_url), workers=1)  # Saves included.
                return answers

            return asyncio.run(all_of_them())

    by_group = served([first])
    by_one = served([first, second], tensor_parallel=None)
    by_group_again = served([second])

    assert by_group[0].cached_tokens == 0
    for restored, prompt in ((by_one[0], first), (by_group_again[0], second)):
        assert restored.disk_tokens >= 128, restored
        assert restored.token_ids[:8] == reference.greedy(prompt, 8)[:8]
