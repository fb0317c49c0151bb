"""Groups of two ranks that serve one model of each kind: greedy answers are ``model.generate``'s, and what is on a disk
is that of single workers.

Every case is a whole cell behind its HTTP API, with real ranks. Tokens really computed are counted at the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cell import running_cell
from tests.integration.conftest import Checkpoints
from tests.integration.exact_scenario import DEVICE_TOKENS, SCHEDULER, Scenario, survive_all
from tests.integration.test_tier_paths import (
    CHUNKED,
    COMPUTED,
    DOCUMENT_TOKENS,
    Document,
    found_in,
    storage_settings,
)
from tests.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KINDS = ("gpt_oss", "mla", "gemma4", "mimo", "qwen3_next", "bamba", "lfm2")
"""Sinks; latents; other heads from layer to layer; all of that but latents; linear attention, a state-space model and
short convolutions.
"""


PAGE_SIZE = 16


def worker_of(ranks: int) -> dict[str, Any]:
    """Settings of a worker whose device holds little."""
    return {"tensor_parallel": ranks, "page_size": PAGE_SIZE, "device_pages": DEVICE_TOKENS // PAGE_SIZE}


@pytest.mark.parametrize("family", ["gpt_oss", "mla", "gemma4", "qwen3_next"])
async def test_served_tokens_equal_generate(family: str, checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """Alone and in chunks, on device and host hits, in mixed batches with cancelled neighbours, through preemption.

    The other kinds are in the test below, and by single workers in ``test_exactness.py``.
    """
    model, reference = checkpoints[family]

    async with running_cell(nats_server.url, model, worker_settings=worker_of(2), scheduler_settings=SCHEDULER) as cell:
        await survive_all(Scenario(cell, reference, PAGE_SIZE))


@pytest.mark.parametrize("family", KINDS)
async def test_a_disk_is_shared_with_single_workers(
    family: str, checkpoints: Checkpoints, nats_server: NatsServer, second_broker: NatsServer, tmp_path: Path
) -> None:
    """What a single worker left is read by a group, and what that one left by a single worker, in cells in which all
    processes are others; in each, prefixes are found on the device and in host memory too.
    """
    model, reference = checkpoints[family]
    cached, saved = DOCUMENT_TOKENS // PAGE_SIZE * PAGE_SIZE, 0
    ways = [found_in("device", cached), found_in("host", cached)]
    # The third cell goes on from the first one's streams, which know nothing of the document that it is asked about.
    for server, ranks, known, unknown in (
        (nats_server, 1, 0, 7),
        (second_broker, 2, 7, 8),
        (nats_server, 1, 8, 0),
    ):
        async with running_cell(
            server.url,
            model,
            worker_settings=worker_of(ranks),
            scheduler_settings={"host_writes": "through", "prefetch_wait": "full", "max_batch_tokens": 90},
            storage_settings=storage_settings(tmp_path) | {"remote": ""},
        ) as cell:
            await cell.hears_of_chunks(saved)
            for seed, first in ((known, found_in("disk", CHUNKED)), (unknown, COMPUTED)):
                if not seed:
                    continue
                document = Document(cell, reference, seed)
                found = [await document.ask(), await document.ask()]
                await cell.flush("device")
                assert [*found, await document.ask()] == [first, *ways], (ranks, seed)
            saved = (await cell.settle()).chunks_in_all
