"""Models whose layers carry states: served greedy answers are ``model.generate``'s, wherever a prefix comes from.

One of linear attention, one state-space model and one of short convolutions, each with layers of attention among the
others. Every case is a whole cell behind its HTTP API; tokens really computed are counted at the worker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cell import running_cell
from tests.integration.conftest import Checkpoints
from tests.integration.exact_scenario import DEVICE_TOKENS, SCHEDULER, Scenario, survive_all
from tests.integration.test_tier_paths import CHUNKED, COMPUTED, Document, found_again, found_in, storage_settings
from tests.nats_server import NatsServer

CHUNKS = {"host_writes": "through", "prefetch_wait": "full", "max_batch_tokens": 90}
"""Prompts are computed in chunks, and kept in every tier."""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "page_size"), [("qwen3_next", 16), ("qwen4_exp", 16), ("deepseek_v4", 16), ("bamba", 64), ("lfm2", 1)]
)
async def test_served_tokens_equal_generate(
    family: str, page_size: int, checkpoints: Checkpoints, nats_server: NatsServer
) -> None:
    """Alone and in chunks, on device and host hits, in mixed batches with cancelled neighbours, through preemption."""
    model, reference = checkpoints[family]
    worker = {"page_size": page_size, "device_pages": DEVICE_TOKENS // page_size}

    async with running_cell(nats_server.url, model, worker_settings=worker, scheduler_settings=SCHEDULER) as cell:
        await survive_all(Scenario(cell, reference, page_size))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "page_size"), [("qwen3_next", 1), ("qwen3_next", 64), ("bamba", 1), ("bamba", 64), ("lfm2", 16)]
)
async def test_every_way_back_gives_the_same_answer(
    family: str, page_size: int, checkpoints: Checkpoints, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Computed in chunks, then found on the device, in host memory and on the disk: states come with the pages."""
    model, reference = checkpoints[family]
    async with running_cell(
        nats_server.url,
        model,
        worker_settings={"page_size": page_size, "device_pages": DEVICE_TOKENS // page_size},
        scheduler_settings=CHUNKS,
        storage_settings=storage_settings(tmp_path) | {"remote": ""},
    ) as cell:
        document = Document(cell, reference, page_size)

        assert await document.ask() == COMPUTED
        await found_again(document, page_size)


@pytest.mark.integration
@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp", "deepseek_v4", "bamba", "lfm2"])
async def test_a_new_cell_finds_what_the_last_one_left_on_the_disk(
    family: str, checkpoints: Checkpoints, nats_server: NatsServer, second_broker: NatsServer, tmp_path: Path
) -> None:
    """The same with pages of the size that the model was found to want; then every process and the broker are new: the
    first request is a disk hit, and its answer the same.
    """
    model, reference = checkpoints[family]
    saved = 0
    for server, found in ((nats_server, COMPUTED), (second_broker, found_in("disk", CHUNKED))):
        async with running_cell(
            server.url,
            model,
            worker_settings={"page_size": 0, "device_kv_bytes": 4 * 2**20},
            scheduler_settings=CHUNKS,
            storage_settings=storage_settings(tmp_path) | {"remote": ""},
        ) as cell:
            await cell.hears_of_chunks(saved)
            document = Document(cell, reference, 7)
            assert await document.ask() == found
            if found == COMPUTED:
                await found_again(document, (await cell.status()).page_size)
            saved = (await cell.settle()).chunks_in_all
