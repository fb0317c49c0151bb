"""Seeded walks of cells whose disk has hidden states of everything that is asked for: restorations meet every
trouble.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.restoring import exploration
from services.scheduler.core.restoring import restoration_ways as store_questions
from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import chain_root
from shared.messages.cell_events import CellConfig
from shared.messages.pools import HIDDEN
from shared.messages.storage_events import ChunksDropped, ChunksListed
from tests.stateful.cell_driver import GATEWAYS, HIDDEN_TROUBLES, NOISES, TROUBLES, CellDriver, page_of
from tests.stateful.cell_model import namespace
from tests.stateful.model_hidden import COSTS
from tests.stateful.model_pages import Page
from tests.stateful.walking import move, unmet

WALKS = 30
KINDS, CHUNKS = 2, 4
HOLES = [(), (), (1,), (2,), (1, 2), (0, 2)]
"""Which chunks of every prompt have no hidden states, as the turns of a conversation leave them."""

MUST_HAPPEN = (
    "fetch_deadlines",
    "fetches_done",
    "prefetch_waits",
    "fetched_tokens_remote",
    "restorations_explored",
    "restorations_planned_kv",
    "restorations_planned_recompute",
    "restorations_planned_hidden",
    "restored_tokens",
    "restores_refused",
    "hidden_fetched_tokens",
    "hidden_fetches_cancelled",
    "hidden_fetches_done",
    "hidden_fetches_failed",
    "hidden_holes_planned",
    "hidden_runs",
    "hidden_runs_extended",
    "hidden_runs_without_room",
    "storages_lost",
    "store_questions_answered",
    "store_questions_in_vain",
    "store_questions_spared",
    "store_questions_hidden",
    "workers_lost",
)


def put_on_disk(driver: CellDriver, *, has_kv: bool, holes: Sequence[int] = ()) -> None:
    """Let the disk hold the hidden states of every prompt that a walk may ask for, or its KV too, and say so.

    Chunks ``holes`` of each prompt have KV alone.
    """
    storage = driver.cell.storages.get("storage")
    if storage is None or storage.hidden_pool is None:
        return
    each, size = chunk_pages(driver.cell.page_size), driver.cell.page_size
    chunks: dict[bytes, list[Page]] = {}
    for shape in product(range(KINDS), repeat=CHUNKS * chunk_tokens(size) // size):
        before, pages = chain_root(namespace()), []
        for place, kind in enumerate(shape):
            pages.append(Page(before, page_of(kind, size)))
            before = pages[-1].identity()
            driver.cell.ever_computed.add(before)
            if len(pages) == each:
                chunks[before] = pages
                if place // each not in holes:
                    storage.hidden_disk.chunks[before] = pages
                pages = []
    said: dict[str, Any] = {
        "storage_id": "storage",
        "incarnation": storage.incarnation,
        "chunks": b"".join(storage.hidden_disk.chunks),
    }
    driver.cell.feed(ChunksListed(**said, form=HIDDEN))
    if has_kv:
        storage.disk.chunks.update(chunks)
        driver.cell.feed(ChunksListed(**said | {"chunks": b"".join(chunks)}))


def leave_to_store(driver: CellDriver, chance: random.Random) -> None:
    """Let the object store alone hold some of what the disk held, as if another node had kept it there."""
    storage = driver.cell.storages.get("storage")
    if storage is None or storage.hidden_pool is None:
        return
    said: dict[str, Any] = {"storage_id": "storage", "incarnation": storage.incarnation}
    for form, disk, store in (
        ("kv", storage.disk, driver.cell.remote),
        (HIDDEN, storage.hidden_disk, driver.cell.hidden_remote),
    ):
        part = chance.choice([0.0, 0.7, 1.0])
        store.chunks.update({name: pages for name, pages in disk.chunks.items() if chance.random() < part})
        names = b"".join(disk.chunks)
        formed: dict[str, Any] = {"form": form}
        disk.chunks.clear()
        driver.cell.feed(ChunksDropped(**said, chunks=names, **formed))


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([10, 100, 300]),
        max_running=chance.randint(1, 4),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=8,
        hidden_form="0/1/0",
        restoring=chance.choice(["planned", "planned", "planned", HIDDEN, "kv"]),
        prefetch_wait=chance.choice(["best_effort", "deadline", "full", "full"]),
        defer_tokens=chance.choice([0, 2]),
        disk_writes=chance.choice(["through", "off"]),
        min_prefetch_tokens=1,
        max_attempts=chance.choice([2, 6]),
    )
    scale, has_remote = chance.choice([1, 1, 2]), chance.random() < 0.5
    driver = CellDriver(
        config,
        page_size=64 // scale,
        workers=chance.randint(1, 2),
        pages=chance.choice([8, 24]) * scale,
        host_pages=chance.choice([6, 12]) * scale,
        disk_chunks=100,
        has_remote=has_remote,
        hidden_pages=chance.choice([2, 4, 8, 40]) * scale,
    )
    troubles, noises = chance.choice([0.0, 0.03, 0.1]), chance.choice([0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            # Workers that join from here on may be so fast that nothing is worth fetching for them.
            speed = chance.choice([1.0, 1.0, 1e-6])
            driver.cell.restoration = structs.replace(COSTS, token_us=COSTS.token_us * speed)
            driver.trouble(chance.choice(TROUBLES + HIDDEN_TROUBLES * 4), chance.randrange(1000))
            if "storage" in driver.cell.storages:  # So slow that computing is faster, or as fast as it was.
                driver.cell.storages["storage"].chunk_seconds = chance.choice([1e-5, 0.3])
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.08:
            driver.flush(chance.choice([("device", "host"), ("device", "host"), ("device", "host", "disk")]), None)
            put_on_disk(driver, has_kv=chance.random() < 0.4, holes=chance.choice(HOLES))
            if has_remote and chance.random() < 0.7:
                leave_to_store(driver, chance)
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
            [chance.randrange(KINDS) for _ in range(chance.randint(1, CHUNKS * scale))],
            chance.randint(1, 3),
            chance.choice([1, 2, 20]),
            gateway_id=chance.choice(GATEWAYS),
            deadline_ms=chance.choice([0, 0, 0, 5]),
            write=chance.random() < 0.9,
            ignore_eos=chance.random() < 0.7,
        )
    else:
        move(driver, chance, kind, most_rounds=3)


def test_walks_with_restorations_end_well_and_meet_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    monkeypatch.setattr(exploration, "TRIED_EVERY", 3)  # Walks are too short for trials that are as rare as they are.
    monkeypatch.setattr(store_questions, "_PATIENCE", 2)
    assert unmet((walk(seed, 60 + 60 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
