"""Two nodes whose storages read one another's host memory and disks by NIXL, as real processes."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from services.storage.sharing.parts import is_installed
from shared import subjects
from shared.codec import encode
from shared.messages.cell_events import FlushCache
from shared.messages.status import CellStatus
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.integration.machines import DOCUMENT_TOKENS, PAGE_SIZE, Machines, running_machines
from tests.nats_server import NatsServer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_installed(), reason="NIXL has no wheel for this platform"),
]


async def _with_documents_at_a(machines: Machines, *prompts: list[int]) -> list[list[int]]:
    """Node a computes prompts, copies them to host memory and loses its worker; node b has one. Returns the answers."""
    a, b = machines.nodes["a"], machines.nodes["b"]
    await machines.start_storage(a)
    await machines.start_worker(a)
    await machines.ready(1)
    answers = await machines.ask(*(machines.body(prompt, 8) for prompt in prompts))
    await machines.settle(1)
    await machines.start_storage(b)
    await machines.start_worker(b)
    await machines.ready(2)
    os.kill(a["worker"].pid, signal.SIGKILL)
    await machines.give_up("worker", "worker-a")
    await machines.until(
        lambda cell: [worker.worker_id for worker in cell.workers] == ["worker-b"] and _hold(cell, len(prompts))
    )
    return [answer.token_ids for answer in answers]


def _hold(cell: CellStatus, documents: int) -> bool:
    """Whether node a has so many documents in host memory."""
    cached = sum(pool.cached for pool in cell.pools if (pool.tier, pool.owner) == ("host", "storage-a"))
    return cached >= documents * (DOCUMENT_TOKENS // PAGE_SIZE)


def _prompts(checkpoints: Checkpoints, seed: int, family: str = "llama") -> tuple[list[int], list[int]]:
    """Two questions about one document whose answers rounding cannot change."""
    rng = random.Random(seed)
    _, reference = checkpoints[family]
    document = [rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS)]
    first, second = (
        reference.decided(lambda: [*document, *(rng.randrange(8, VOCAB_SIZE) for _ in range(9))], 8, ignore_eos=True)
        for _ in range(2)
    )
    return first, second


@pytest.mark.parametrize("family", ["llama", "mla", "bamba"])
async def test_a_prefix_comes_from_another_nodes_host_memory_until_that_dies(
    family: str, nats_server: NatsServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Nothing of the document is computed again, and the answer is the same; the lender's copy is free again. Pages
    may hold K and V, latents, or what layers of a state-space model carry. When the lender is
    killed before the cell knows, a request for another document computes, and nothing is lost.
    """
    model, reference = checkpoints[family]
    first, second = _prompts(checkpoints, 5, family)
    other, lost = _prompts(checkpoints, 6, family)
    async with running_machines(
        (nats_server.url,), model, tmp_path, has_disks=False, storage={"share": "nixl"}
    ) as machines:
        computed = await _with_documents_at_a(machines, first, other)
        (borrowed,) = await machines.ask(machines.body(second, 8))
        after = await machines.settle(1)
        (again,) = await machines.ask(machines.body(second, 8))
        os.kill(machines.nodes["a"]["storage"].pid, signal.SIGKILL)
        (alone,) = await machines.ask(machines.body(lost, 8))
        await machines.give_up("storage", "storage-a")
        killed = await machines.settle(1)

    assert computed == [reference.greedy(prompt, 8, ignore_eos=True) for prompt in (first, other)]
    assert borrowed.token_ids == again.token_ids == reference.greedy(second, 8, ignore_eos=True)
    assert borrowed.cached_tokens == borrowed.lent_tokens == DOCUMENT_TOKENS
    assert after.counters["fetched_tokens_lent"] == DOCUMENT_TOKENS
    assert after.counters["loans_started"] == 1
    assert alone.token_ids == reference.greedy(lost, 8, ignore_eos=True)
    assert alone.cached_tokens == 0
    assert (killed.counters["fetches_failed"], killed.counters["loans_started"]) == (1, 2)


async def test_a_node_that_ends_hands_on_what_is_hot(
    nats_server: NatsServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Its storage waits until the other node has copied the document, ends by itself, and nothing is computed again."""
    model, reference = checkpoints["llama"]
    first, second = _prompts(checkpoints, 7)
    async with running_machines(
        (nats_server.url,), model, tmp_path, has_disks=False, storage={"share": "nixl", "handover_ms": 30_000}
    ) as machines:
        await _with_documents_at_a(machines, first)
        leaving = machines.nodes["a"]["storage"]
        leaving.terminate()
        ended = ("node_drains_done", "node_drains_cut_short")
        counters = (await machines.until(lambda cell: any(cell.counters.get(name, 0) for name in ended))).counters

        # Within the block, so that a failure shows the logs.
        assert counters.get("handed_on_pages", 0) >= DOCUMENT_TOKENS // PAGE_SIZE, counters
        assert "node_drains_cut_short" not in counters, counters
        await machines.until(lambda cell: cell.storages == ("storage-b",))
        assert await leaving.wait() == 0
        (answer,) = await machines.ask(machines.body(second, 8))
        assert answer.token_ids == reference.greedy(second, 8, ignore_eos=True)
        assert answer.cached_tokens == answer.host_tokens == DOCUMENT_TOKENS


async def test_a_prefix_comes_from_another_nodes_disk(
    nats_server: NatsServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """It is in nobody's memory: the node that has it on its disk reads it, and the other borrows it."""
    model, reference = checkpoints["llama"]
    first, second = _prompts(checkpoints, 8)
    async with running_machines(
        (nats_server.url,), model, tmp_path, has_disks=True, storage={"share": "nixl"}
    ) as machines:
        await _with_documents_at_a(machines, first)
        await machines.until(lambda cell: cell.chunks_in_all >= DOCUMENT_TOKENS // 64)
        flush = FlushCache(call_id="test", tiers=("device", "host"))
        await machines.bus.append(subjects.cell_input(), encode(flush))
        await machines.until(lambda cell: all(not pool.cached for pool in cell.pools))
        (answer,) = await machines.ask(machines.body(second, 8))
        after = await machines.settle(1)

    assert answer.token_ids == reference.greedy(second, 8, ignore_eos=True)
    assert answer.cached_tokens == answer.lent_tokens == DOCUMENT_TOKENS
    assert after.counters["raised_tokens"] == after.counters["fetched_tokens_lent"] == DOCUMENT_TOKENS
