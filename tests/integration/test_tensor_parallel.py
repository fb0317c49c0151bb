"""A worker that is a group of two ranks, in whole cells over HTTP."""

from __future__ import annotations

import asyncio
import json
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

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

ANSWER_TOKENS = 200
FEW_TOKENS = 8
READY_TIMEOUT_S = 600.0
WORKER = "worker-0"


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


async def kill_rank_under(cell: RunningCell, model: Path, prompt: list[int], rank: int) -> list[int]:
    """The tokens of an answer under which a rank is killed, as soon as it has begun."""
    tokens: list[int] = []
    body = body_of(model, prompt, ANSWER_TOKENS) | {"stream": True}
    async with client_of(cell) as client, client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if not tokens:
                os.kill(rank, signal.SIGKILL)
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens += choice["token_ids"]
    return tokens


def test_a_group_outlives_its_ranks(model: Path) -> None:
    """A rank dies under a stream: the worker comes back with all its ranks, the stream goes on with the same tokens,
    and no memory of the first incarnation stays. That groups and single workers share disks is in
    ``test_group_kinds.py``.
    """
    reference = Reference(model)
    prompt = prompt_of(reference, 60, ANSWER_TOKENS, seed=1)
    with running(settings(model), ready_timeout_s=READY_TIMEOUT_S) as cell:
        pid = cell.pids()[WORKER]
        tokens = asyncio.run(kill_rank_under(cell, model, prompt, rank_1_of(pid)))
        restarted = cell.wait_restarted(WORKER, pid, timeout_s=READY_TIMEOUT_S)
        after = asyncio.run(settled(lambda: status_at(cell.nats_url), workers=1, timeout_s=READY_TIMEOUT_S))
        rank = rank_1_of(restarted)
        log = cell.logs(WORKER, 400)
        prefix = cell.shm_prefix

    assert tokens == reference.greedy(prompt, ANSWER_TOKENS, ignore_eos=True)
    assert after.counters.get("requests_resumed", 0) == 1, after.counters
    assert "group_lost" in log
    assert not Path(f"/proc/{rank}").exists()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
