"""Long seeded walks under pressure. Their mixture of events reaches what short examples seldom do."""

from __future__ import annotations

import random

from msgspec import structs

from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import GATEWAYS, NOISES, TROUBLES, VARIANTS, CellDriver
from tests.stateful.walking import move, unmet

WALKS = 150

# What the walks together must have met; otherwise they would prove nothing about it.
MUST_HAPPEN = (
    "backups_done",
    "backups_failed",
    "batches_loading_bound",
    "chunks_failed",
    "copied_ahead_pages",
    "delay_hits_deferred",
    "duplicate_requests",
    "evicted_pages_device",
    "evicted_pages_host",
    "catalogue_overflow_chunks",
    "failed_attempts_exhausted",
    "failed_cancelled",
    "failed_deadline_exceeded",
    "fetch_deadlines",
    "fetched_tokens",
    "fetched_tokens_remote",
    "fetches_cancelled",
    "fetches_done",
    "fetches_failed",
    "fetches_shared",
    "fetches_started",
    "fetches_without_room",
    "finished_cancelled",
    "finished_deadline",
    "finished_length",
    "finished_stop",
    "hit_tokens_device",
    "hit_tokens_disk",
    "hit_tokens_host",
    "hit_tokens_neighbour",
    "hit_tokens_remote",
    "host_admitted_pages",
    "host_refused_frequency_pages",
    "host_refused_hotness_pages",
    "leases_extended",
    "loads_failed",
    "neighbours_distrusted",
    "preemptions",
    "prefetch_deadlines",
    "prefetch_waits",
    "promoted_pages",
    "promotion_evicted_pages",
    "promotions_failed",
    "promotions_started",
    "quarantined_pages",
    "refused_queue_full",
    "requests_deferred",
    "requests_resumed",
    "requests_stolen",
    "saved_chunks",
    "saves_done",
    "saves_failed",
    "saves_put_off_chunks",
    "stale_inputs",
    "storages_lost",
    "workers_lost",
)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters. In every third, most of what comes back is on disk only."""
    chance = random.Random(seed)
    is_deep = seed % 3 == 0
    config = CellConfig(
        max_batch_tokens=chance.choice([3, 24, 200]),
        max_running=chance.randint(1, 4),
        max_queued=chance.randint(2, 8),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=chance.choice([1, 8]),
        reserve_fraction=chance.choice([0.0, 0.3]),
        min_host_load_tokens=chance.choice([1, 20]),
        max_attempts=chance.choice([2, 6]),
        bubble_prefill=seed % 2 == 1,
        **{name: chance.choice(values) for name, values in VARIANTS.items()},
    )
    if is_deep:
        config = structs.replace(config, disk_writes="through", max_batch_tokens=200)
    driver = CellDriver(
        config,
        page_size=64 if is_deep else chance.choice([1, 4, 16, 32, 64]),
        workers=chance.randint(1, 2),
        pages=chance.choice([6, 8, 10, 16, 24]),
        host_pages=chance.choice([6, 12] if is_deep else [0, 3, 30, 30, 60]),
        disk_chunks=chance.choice([6, 100] if is_deep else [0, 2, 40, 40]),
        has_remote=chance.random() < 0.3,
    )
    troubles, noises = chance.choice([0.0, 0.02, 0.1]), chance.choice([0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice(TROUBLES), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.01:
            operate(driver, chance)
        elif is_deep and point < troubles + noises + 0.06:
            driver.flush(("device", "host"), None)
        else:
            work(driver, chance, salts=("",) if is_deep else ("", "", "", "other"))
        if is_deep and chance.random() < 0.3:
            driver.everything_moves(1)
    driver.finish()
    return driver.cell.state.counters


def operate(driver: CellDriver, chance: random.Random) -> None:
    """An operator does something."""
    if chance.random() < 0.5:
        variant = {name: chance.choice(values) for name, values in VARIANTS.items()}
        driver.configure(chance.random() < 0.7, chance.choice([1, 40]), **variant)
    else:
        tiers = chance.choice([("device",), ("host",), ("device", "host"), ("disk",), ("remote", "host")])
        driver.flush(tiers, chance.choice([None, "", "other"]))


def work(driver: CellDriver, chance: random.Random, salts: tuple[str, ...]) -> None:
    """A request comes, or something moves."""
    kind = chance.choice(["submit", "submit", "all", "worker", "heard", "storage", "storage", "fetch", "promote"])
    if kind == "submit":
        driver.submit(
            [chance.randint(0, 1) for _ in range(chance.randint(1, 5))],
            chance.randint(0, 3),
            chance.randint(1, 6),
            salt=chance.choice(salts),
            gateway_id=chance.choice(GATEWAYS),
            priority=chance.choice([0, 0, 1]),
            deadline_ms=chance.choice([0, 0, 0, 5]),
            read=chance.random() < 0.9,
            write=chance.random() < 0.9,
            prompt_logprobs=1 if chance.random() < 0.05 else None,
            tenant=chance.choice(["", "", "a", "b"]),
        )
    elif kind == "promote":
        driver.worker_promotes(chance.randrange(1000), chance.random() < 0.5)
    else:
        move(driver, chance, kind)


def test_walks_end_well_and_meet_everything() -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
