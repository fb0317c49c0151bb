"""Seeded walks of tenants that lease prefixes and say when they return: budgets hold, and everything ends."""

from __future__ import annotations

import random

from shared.messages.cell_events import CellConfig
from shared.messages.requests import CacheQuota, Lease
from tests.stateful.cell_driver import GATEWAYS, NOISES, TROUBLES, VARIANTS, CellDriver
from tests.stateful.cell_model import geometry
from tests.stateful.walking import move, unmet

WALKS = 80
TENANTS = {"a": "tenant-a", "a, further": "tenant-a", "": "tenant-b"}

# What the walks together must have met; otherwise they would prove nothing about it.
MUST_HAPPEN = (
    "cache_leased_pages_lost",
    "cache_leases_expired",
    "cache_leases_gave_way",
    "cache_leases_granted",
    "cache_leases_lost",
    "cache_leases_refused",
    "cache_leases_renewed",
    "cache_leases_replaced",
    "evicted_pages_device",
    "evicted_pages_host",
    "hit_tokens_host",
    "preemptions",
    "quarantined_pages",
    "returns_given_up",
    "returns_late",
    "returns_met",
    "returns_over_budget",
    "storages_lost",
    "workers_lost",
)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([24, 200]),
        max_running=chance.randint(1, 4),
        max_queued=chance.randint(2, 8),
        lease_tokens=chance.choice([1, 8]),
        reserve_fraction=chance.choice([0.0, 0.3]),
        pin_fraction=chance.choice([0.25, 0.5, 0.9]),
        **{name: chance.choice(values) for name, values in VARIANTS.items()},
    )
    driver = CellDriver(
        config,
        page_size=chance.choice([1, 4, 16, 64]),
        workers=chance.randint(1, 2),
        pages=chance.choice([8, 10, 16, 24]),
        host_pages=chance.choice([0, 6, 12, 30, 30]),
        disk_chunks=chance.choice([0, 6, 40]),
    )
    troubles = chance.choice([0.01, 0.06])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice((*TROUBLES, "worker_drains")), chance.randrange(1000))
        elif point < troubles + 0.1:
            driver.noise(chance.choice((*NOISES, "cache_lease_timer")), chance.randrange(1000))
        elif point < troubles + 0.12:
            driver.flush(chance.choice([("device",), ("host",)]), chance.choice([None, "a"]))
        else:
            work(driver, chance)
    driver.finish()
    return driver.cell.state.counters


def work(driver: CellDriver, chance: random.Random) -> None:
    """A request comes, mostly one that leases, or something moves."""
    kind = chance.choice(["submit", "submit", "all", "worker", "heard", "storage", "storage", "fetch", "promote"])
    if kind == "promote":
        driver.worker_promotes(chance.randrange(1000), chance.random() < 0.5)
        return
    if kind != "submit":
        move(driver, chance, kind)
        return
    salt, size = chance.choice(list(TENANTS)), driver.cell.page_size
    shape = [chance.randint(0, 1) for _ in range(chance.randint(1, 5))]
    leases = tuple(
        Lease(
            tokens=chance.choice([0, size, size * len(shape) // 2, size * len(shape)]),
            ttl_ms=chance.choice([1, 50, 3_600_000]),
            key=chance.choice(["", "", "session-1", "session-2"]),
            with_answer=chance.random() < 0.3,
        )
        for _ in range(chance.choice([0, 1, 1, 2]))
    )
    quota = CacheQuota(owner=TENANTS[salt], host_bytes=2 * geometry(size).page_bytes)
    driver.submit(
        shape,
        chance.randint(0, 3),
        chance.randint(1, 6),
        salt=salt,
        tenant=TENANTS[salt],
        quota=quota if chance.random() < 0.1 else None,
        gateway_id=chance.choice(GATEWAYS),
        deadline_ms=chance.choice([0, 0, 0, 5]),
        write=chance.random() < 0.9,
        leases=leases,
        max_leased_tokens=chance.choice([0, 3, 8, 8]) * size,
        returns_in_ms=chance.choice([0, 0, 5, 60_000]),
    )


def test_walks_keep_to_budgets_and_meet_everything() -> None:
    """Every step kept the invariants of leases, every lease ended and let go, and all of this happened on the way."""
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
