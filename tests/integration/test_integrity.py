"""Cached state that went bad is noticed, quarantined and computed again; a wrong token is never served."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.memory import SharedSegment
from tests.cases import case
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer

PAGE_SIZE = 16
DEVICE_TOKENS = 256


def host_segment(cell: Cell) -> SharedSegment:
    """A mapping of the host pool of this cell's storage, found as any process of this user could."""
    files = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(cell.shm_prefix)]
    (file,) = [path for path in files if ".host." in path.name]
    return SharedSegment.attach(file.name, file.stat().st_size)


@pytest.mark.integration
async def test_damaged_host_memory_is_recomputed_not_served(checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """The KV of every page of the host pool is damaged, and later every identity; the answer is the same, and no token
    is claimed from host memory.
    """
    model, reference = checkpoints["llama"]
    rng = random.Random(3)
    document = reference.decided(lambda: [rng.randrange(8, VOCAB_SIZE) for _ in range(100)], 12)
    worker = {"page_size": PAGE_SIZE, "device_pages": DEVICE_TOKENS // PAGE_SIZE}
    # Least recently used, so that the document is what leaves the device.
    settings: dict[str, Any] = {"worker_settings": worker, "scheduler_settings": {"policy": "lru"}}
    async with running_cell(nats_server.url, model, **settings) as cell:
        failed = 0
        for damage in ("kv", "identities"):
            with case(damage=damage):
                await cell.flush("device", "host")
                await cell.complete(document, 4)
                for _ in range(6):
                    await cell.complete([rng.randrange(8, VOCAB_SIZE) for _ in range(120)], 2)
                status = await cell.settle()
                assert status.counters["backups_done"] > 0
                segment = host_segment(cell)
                # Tables follow the pages: identities take 16 bytes a page, checksums 8 a page and layer.
                pages = next(pool.total for pool in status.pools if pool.tier == "host")
                tables = segment.nbytes - pages * 16 - pages * 3 * 8
                part = segment.array[:tables] if damage == "kv" else segment.array[tables : tables + pages * 16]
                np.bitwise_xor(part, 1, out=part)

                answer = await cell.complete(document, 12)
                status = await cell.settle()

                del part
                segment.close()
                assert answer["choices"][0]["token_ids"] == reference.greedy(document, 12)
                assert answer["usage"]["prompt_tokens_details"]["host_tokens"] == 0
                assert status.counters["loads_failed"] > failed
                assert (await cell.inventory()).counters["loads_failed"] == status.counters["loads_failed"]
                failed = status.counters["loads_failed"]
                # The damaged pages are out of the tree: the next request computes little, and loads nothing.
                again = await cell.complete(document, 12)
                assert again["choices"][0]["token_ids"] == reference.greedy(document, 12)
                assert again["usage"]["prompt_tokens_details"]["device_tokens"] == 96
