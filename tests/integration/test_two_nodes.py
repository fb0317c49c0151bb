"""Two nodes of one cell as real processes, on a NATS cluster of three: they share prefixes through an object store, and
when all of one node dies at once, the other goes on with its requests.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.conformance.object_stores import S3Place
from tests.integration.conftest import Checkpoints
from tests.integration.decided_load import asked_until, decided_body, differing
from tests.integration.machines import DOCUMENT_TOKENS, Machines, host_pools, running_machines
from tests.nats_server import NatsCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

REQUESTS = 8
ANSWER_TOKENS = 100
SILENCE_MS = 20_000
"""Longer than a process that lives is silent on busy cores, or while it finds another server."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    """Three servers, each on a loopback address of its own."""
    made = NatsCluster(tmp_path / "nats", hosts=("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
async def machines(cluster: NatsCluster, checkpoints: Checkpoints, tmp_path: Path) -> AsyncIterator[Machines]:
    """A cell without nodes yet."""
    model, _ = checkpoints["llama"]
    place = S3Place()
    with place.environment():
        storage = {"remote": place.config().remote}
        async with running_machines(
            cluster.urls,
            model,
            tmp_path,
            has_disks=True,
            storage=storage,
            stream_replicas=3,
            heartbeat_lost_ms=SILENCE_MS,
        ) as made:
            yield made
    place.close()


def document(seed: int) -> tuple[list[int], random.Random]:
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS)], rng


async def test_a_node_that_dies_leaves_its_requests_and_its_prefixes_to_the_other(
    machines: Machines, cluster: NatsCluster, checkpoints: Checkpoints
) -> None:
    """Worker, storage and NATS server of node a are killed at once, under load; no answer differs by a token. What was
    computed there before node b was started, node b restores from the object store.
    """
    model, reference = checkpoints["llama"]
    a, b = machines.nodes["a"], machines.nodes["b"]
    tokens, rng = document(1)
    shared, tails = document(2)

    def draw() -> list[int]:
        return [*tokens, *(rng.randrange(8, VOCAB_SIZE) for _ in range(9))]

    def draw_load(n: int) -> list[int]:
        return [*shared[: 64 * (n % 4)], *(tails.randrange(8, VOCAB_SIZE) for _ in range(40 + n))]

    first, second = (reference.decided(draw, 8, ignore_eos=True) for _ in range(2))
    bodies = [
        decided_body(reference, model.name, functools.partial(draw_load, n), ANSWER_TOKENS, is_sampled=n % 2 == 1)
        for n in range(REQUESTS)
    ]
    await machines.start_storage(a)
    await machines.start_worker(a)
    await machines.ready(1)
    (computed,) = await machines.ask(machines.body(first, 8))
    await machines.settle(1)
    await machines.uploaded(a)
    await machines.start_storage(b)
    await machines.start_worker(b)
    await machines.ready(2)
    calm = await machines.ask(*bodies)
    before = await machines.settle(2)

    is_over = asyncio.Event()
    async with machines.client() as client:
        load = asyncio.create_task(asked_until(client, bodies, is_over))
        await machines.until(
            lambda cell: {each.worker_id for each in cell.workers if each.running} == {"worker-a", "worker-b"}
        )
        cluster.servers[0].kill()
        for kind in ("worker", "storage"):
            os.kill(a[kind].pid, signal.SIGKILL)
        is_over.set()
        fired = await load
    # The storage is given up after its worker: that one is seen to die, this one falls silent.
    await machines.until(lambda cell: host_pools(cell) == ["storage-b"])
    after = await machines.settle(1)
    (restored,) = await machines.ask(machines.body(second, 8))
    await machines.settle(1)

    assert differing(calm, fired) == []
    assert all(len(answer.token_ids) == ANSWER_TOKENS for answer in calm)
    assert after.counters["requests_accepted"] == after.counters["finished_length"]
    assert after.counters["finished_length"] == 1 + REQUESTS + sum(map(len, fired))
    assert after.counters["workers_lost"] == before.counters.get("workers_lost", 0) + 1
    assert computed.token_ids == reference.greedy(first, 8, ignore_eos=True)
    assert restored.token_ids == reference.greedy(second, 8, ignore_eos=True)
    assert computed.cached_tokens == 0
    assert restored.remote_tokens == restored.cached_tokens == DOCUMENT_TOKENS
    # What came from the store is on the disk of node b now.
    assert any(path.is_file() for path in b.disk.rglob("*"))
