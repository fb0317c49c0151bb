"""A worker of a whole cell is told to end: answers go on, what was hot stays, and the process leaves by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.held_steps import held_steps
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration

PAGE = 16
SETTINGS = {"page_size": PAGE, "device_kv_bytes": 4 * 2**20, "drain_timeout_ms": 600_000}


async def holder_of(cell: Cell) -> str:
    """The one worker that has anything cached."""
    pools = (await cell.status()).pools
    (found,) = [pool.owner for pool in pools if pool.tier == "device" and pool.cached]
    return found


async def stop_worker(cell: Cell, name: str) -> None:
    """SIGTERM, and wait for its end."""
    cell.lives[name].signalled()
    await ended(cell, name)


async def ended(cell: Cell, name: str) -> None:
    """Wait until a worker that was told to end has ended."""
    async with asyncio.timeout(200):  # Less than it would wait for, had nobody let it go.
        await cell.tasks[name]


async def cell_is(cell: Cell, claim: Callable[..., bool]) -> None:
    """Wait until the scheduler's status is so."""
    async with asyncio.timeout(60):
        while not claim(await cell.status()):
            await asyncio.sleep(0.01)


def prompt_of(reference: Reference, length: int, max_tokens: int, seed: int) -> list[int]:
    """A prompt to which rounding decides no token of the answer, in whatever batch it is computed."""
    rng = random.Random(seed)
    return reference.decided(lambda: [rng.randrange(8, VOCAB_SIZE) for _ in range(length)], max_tokens)


def details(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return found


async def test_a_prefix_that_only_the_leaving_worker_had_is_a_host_hit(
    nats_server: NatsServer, checkpoints: Checkpoints
) -> None:
    """Nothing evicted it, so without the hand-over it would be nowhere; and the answer is the same."""
    model, reference = checkpoints["llama"]
    prompt = prompt_of(reference, 8 * PAGE + 3, 4, seed=1)
    async with running_cell(nats_server.url, model, workers=2, worker_settings=SETTINGS) as cell:
        before = (await cell.flush("host")).counters
        first = await cell.complete(prompt, 4)
        await cell.settle()
        await stop_worker(cell, await holder_of(cell))
        status = await cell.settle()
        again = await cell.complete(prompt, 4)

        assert [worker.draining for worker in status.workers] == [False]
        assert status.counters["drains_done"] - before.get("drains_done", 0) == 1
        assert status.counters["handed_over_pages"] - before.get("handed_over_pages", 0) >= 8
        counters = (await cell.status()).counters
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert details(again)["cached_tokens"] == 8 * PAGE
    assert counters["hit_tokens_host"] - before.get("hit_tokens_host", 0) == 8 * PAGE


async def test_answers_of_a_worker_that_drains_end_where_they_began(
    nats_server: NatsServer, checkpoints: Checkpoints
) -> None:
    """They have the time for it, so nobody is asked to go on elsewhere, and no token is another."""
    model, reference = checkpoints["llama"]
    prompts = [prompt_of(reference, 20, 60, seed=number) for number in range(4)]
    async with running_cell(nats_server.url, model, workers=2, worker_settings=SETTINGS) as cell:
        alone = [(await cell.complete(prompt, 60))["choices"][0]["token_ids"] for prompt in prompts]
        before = (await cell.flush("device", "host")).counters
        with held_steps():
            asked = [asyncio.create_task(cell.complete(prompt, 60)) for prompt in prompts]
            # Who comes when every worker has its held batches waits, and is not on the leaving one's account.
            await cell_is(cell, lambda status: 0 < status.running == len(prompts) - status.queued)
            running = {worker.worker_id: worker.running for worker in (await cell.status()).workers}
            leaving = max(running, key=running.__getitem__)
            cell.lives[leaving].signalled()
            await cell_is(cell, lambda status: any(worker.draining for worker in status.workers))
        await ended(cell, leaving)
        answers = [(await task)["choices"][0]["token_ids"] for task in asked]

        counters = (await cell.settle()).counters
    assert answers == alone
    assert counters["drains_done"] - before.get("drains_done", 0) == 1
    assert counters.get("resumes_needed", 0) == before.get("resumes_needed", 0)
