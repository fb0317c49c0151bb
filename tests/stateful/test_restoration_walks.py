"""Seeded walks of cells whose disk has state of everything that is asked for: restorations meet every trouble."""

from __future__ import annotations

import random
from itertools import product

import pytest
from msgspec import structs

from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import chain_root
from shared.messages.cell_events import CellConfig
from shared.messages.storage_events import ChunksListed
from tests.stateful.cell_driver import GATEWAYS, NOISES, STATE_TROUBLES, TROUBLES, CellDriver
from tests.stateful.cell_model import namespace
from tests.stateful.model_pages import Page
from tests.stateful.model_state import COSTS

WALKS = 30
KINDS, CHUNKS = 2, 3

MUST_HAPPEN = (
    "fetch_deadlines",
    "fetches_done",
    "prefetch_waits",
    "restorations_planned_kv",
    "restorations_planned_recompute",
    "restorations_planned_state",
    "restored_tokens",
    "restores_refused",
    "state_fetched_tokens",
    "state_fetches_cancelled",
    "state_fetches_done",
    "state_fetches_failed",
    "state_runs",
    "state_runs_extended",
    "state_runs_without_room",
    "storages_lost",
    "workers_lost",
)


def put_on_disk(driver: CellDriver, *, has_kv: bool) -> None:
    """Let the disk hold the state of every prompt that a walk may ask for, or its KV too, and say so."""
    storage = driver.cell.storages.get("storage")
    if storage is None or storage.state_pool is None:
        return
    each, size = chunk_pages(driver.cell.page_size), driver.cell.page_size
    for shape in product(range(KINDS), repeat=CHUNKS * chunk_tokens(size) // size):
        before, pages = chain_root(namespace()), []
        for kind in shape:
            pages.append(Page(before, [kind * 100 + place for place in range(size)]))
            before = pages[-1].identity()
            driver.cell.ever_computed.add(before)
            if len(pages) == each:
                storage.state_disk.chunks[before] = pages
                pages = []
    said = {"storage_id": "storage", "incarnation": storage.incarnation, "chunks": b"".join(storage.state_disk.chunks)}
    driver.cell.feed(ChunksListed(**said, form="state"))
    if has_kv:
        storage.disk.chunks.update(storage.state_disk.chunks)
        driver.cell.feed(ChunksListed(**said))


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([10, 100, 300]),
        max_running=chance.randint(1, 4),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=8,
        state_form="0/1/0",
        restoring=chance.choice(["planned", "planned", "planned", "state", "kv"]),
        prefetch_wait=chance.choice(["best_effort", "deadline", "full", "full"]),
        defer_tokens=chance.choice([0, 2]),
        disk_writes=chance.choice(["through", "off"]),
        min_prefetch_tokens=1,
        max_attempts=chance.choice([2, 6]),
    )
    scale = chance.choice([1, 1, 2])
    driver = CellDriver(
        config,
        page_size=64 // scale,
        workers=chance.randint(1, 2),
        pages=chance.choice([8, 24]) * scale,
        host_pages=chance.choice([6, 12]) * scale,
        disk_chunks=100,
        state_pages=chance.choice([2, 4, 8, 40]) * scale,
    )
    troubles, noises = chance.choice([0.0, 0.03, 0.1]), chance.choice([0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            # Workers that join from here on may be so fast that nothing is worth fetching for them.
            speed = chance.choice([1.0, 1.0, 1e-6])
            driver.cell.restoration = structs.replace(COSTS, token_us=COSTS.token_us * speed)
            driver.trouble(chance.choice(TROUBLES + STATE_TROUBLES * 4), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.08:
            driver.flush(chance.choice([("device", "host"), ("device", "host"), ("device", "host", "disk")]), None)
            put_on_disk(driver, has_kv=chance.random() < 0.4)
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
    elif kind == "all":
        driver.everything_moves(chance.randint(1, 3))
    elif kind == "worker":
        driver.worker_steps(chance.randrange(1000), chance.randint(1, 3), chance.random() < 0.5)
    elif kind == "fetch":
        is_heard, is_ok = chance.random() < 0.5, chance.random() < 0.9
        driver.storage_fetches(chance.randrange(1000), chance.randint(1, 3), is_heard, is_ok)
    elif kind == "heard":
        driver.worker_is_heard(chance.randrange(1000), chance.randint(1, 6))
    else:
        driver.storage_steps(chance.random() < 0.5, chance.random() < 0.8)


@pytest.fixture(scope="module")
def totals():
    """The counters of all walks, added up."""
    found: dict[str, int] = {}
    for seed in range(WALKS):
        for name, number in walk(seed, 60 + 60 * (seed % 2)).items():
            found[name] = found.get(name, 0) + number
    return found


@pytest.mark.parametrize("name", MUST_HAPPEN)
def test_walks_with_restorations_end_well_and_meet_everything(totals, name):
    """Every walk ended without a wrong read, a leak or a stuck request, and this happened on the way."""
    assert totals.get(name, 0) > 0
