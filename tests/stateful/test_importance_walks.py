"""Seeded walks of cells whose requests are lossy or exact by chance, on prefixes that they share."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.restoring import exploration
from shared.chunks import chunk_pages
from shared.ids import chain_root
from shared.messages.cell_events import CellConfig
from shared.messages.storage_events import ChunksListed
from tests.stateful.cell_driver import GATEWAYS, HIDDEN_TROUBLES, NOISES, SPARSE_TROUBLES, TROUBLES, CellDriver, page_of
from tests.stateful.cell_model import namespace
from tests.stateful.model_hidden import COSTS
from tests.stateful.model_pages import Page
from tests.stateful.model_sparse import copy_in_parts
from tests.stateful.walking import move, unmet

WALKS = 60
KINDS, CHUNKS = 2, 4

MUST_HAPPEN = (
    "chunks_failed",
    "fetches_done",
    "loads_failed",
    "loads_started",
    "preemptions",
    "requests_deferred",
    "requests_resumed",
    "requests_stolen",
    "restorations_planned_kv",
    "restorations_planned_sparse",
    "sparse_choices_dropped",
    "sparse_disk_bytes",
    "sparse_prefixes",
    "sparse_refused",
    "sparse_tokens_read",
    "storages_lost",
    "warmings_started",
    "workers_lost",
)


def put_on_disk(driver: CellDriver) -> None:
    """Let the disk hold every prompt that a walk may ask for, whole and in parts, and say so."""
    storage = driver.cell.storages.get("storage")
    if storage is None or storage.pool is None:
        return
    size = driver.cell.page_size
    for shape in product(range(KINDS), repeat=CHUNKS):
        before, pages = chain_root(namespace()), []
        for kind in shape:
            for _ in range(chunk_pages(size)):
                pages.append(Page(before, page_of(kind, size)))
                before = pages[-1].identity()
                driver.cell.ever_computed.add(before)
            storage.disk.put(before, pages)
            pages = []
    said: dict[str, Any] = {"storage_id": "storage", "incarnation": storage.incarnation}
    driver.cell.feed(ChunksListed(**said, chunks=b"".join(storage.disk.chunks)))
    copy_in_parts(storage)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell whose prefixes do not last in memory; returns its counters."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([50, 100, 300]),
        max_running=chance.randint(1, 4),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=chance.choice([8, 64]),
        admission=chance.choice(["all", "selective"]),
        admission_frequency=chance.choice([1, 2]),
        restoring=chance.choice(["important", "important", "planned", "planned", "kv"]),
        prefetch_wait=chance.choice(["best_effort", "deadline", "full"]),
        prefetch_fraction=chance.choice([0.5, 1.0]),
        defer_tokens=chance.choice([0, 2, 100]),
        min_prefetch_tokens=chance.choice([1, 1, 100]),
        importance_caching=chance.random() < 0.8,
        max_attempts=chance.choice([2, 6]),
    )
    page_size = chance.choice([16, 32, 64])
    scale = 64 // page_size
    driver = CellDriver(
        config,
        page_size=page_size,
        workers=chance.randint(1, 2),
        pages=chance.choice([8, 12, 24]) * scale,
        host_pages=chance.choice([2, 6, 12]) * scale,
        disk_chunks=chance.choice([6, 100, 100]),
        hidden_pages=chance.choice([0, 0, 16]) * scale,
        keeps_sparse=True,
    )
    if chance.random() < 0.3:
        driver.cell.restoration = structs.replace(COSTS, token_us=chance.choice([1.0, 1e5]))
    troubles, noises = chance.choice([0.0, 0.03, 0.1]), chance.choice([0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice(TROUBLES + HIDDEN_TROUBLES + SPARSE_TROUBLES * 3), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.12:
            driver.flush(chance.choice([("device", "host")] * 4 + [("device",), ("host",), ("disk",)]), None)
            if chance.random() < 0.7:
                put_on_disk(driver)
        else:
            work(driver, chance, scale)
        if chance.random() < 0.3:
            driver.everything_moves(1)
    driver.finish()
    return driver.cell.state.counters


def work(driver: CellDriver, chance: random.Random, scale: int) -> None:
    """A request comes, or something moves."""
    kind = chance.choice(["submit", "submit", "all", "worker", "heard", "storage", "storage", "fetch"])
    if kind == "submit":
        driver.submit(
            [kind for _ in range(chance.randint(1, CHUNKS)) for kind in [chance.randrange(KINDS)] * scale],
            chance.randint(0, 3),
            chance.choice([1, 2, 20]),
            salt=chance.choice(["", "", "", "other"]),
            gateway_id=chance.choice(GATEWAYS),
            deadline_ms=chance.choice([0, 0, 0, 5]),
            ratio=chance.choice([None, None, 0.05, 0.3, 1.0]),
            read=chance.random() < 0.95,
            write=chance.random() < 0.9,
            ignore_eos=chance.random() < 0.7,
        )
    else:
        move(driver, chance, kind)


def test_walks_with_lossy_requests_end_well_and_meet_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """No exact request read or found what is lossy, nothing leaked, every replay was equal, and all this happened."""
    monkeypatch.setattr(exploration, "TRIED_EVERY", 3)  # Walks are too short for what happens as rarely as that.
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
