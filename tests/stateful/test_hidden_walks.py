"""Seeded walks of cells that keep hidden states: prefixes are saved, restored, and everything goes wrong."""

from __future__ import annotations

import random

from shared.messages.cell_events import CellConfig
from shared.messages.pools import HIDDEN
from tests.stateful.cell_driver import GATEWAYS, HIDDEN_TROUBLES, NOISES, TROUBLES, CellDriver
from tests.stateful.walking import move, unmet

WALKS = 45

MUST_HAPPEN = (
    "chunks_failed",
    "preemptions",
    "restorations_planned_hidden",
    "restored_tokens",
    "saved_chunks",
    "saved_hidden_chunks",
    "hidden_fetches_done",
    "hidden_fetches_failed",
    "hidden_leases",
    "hidden_leases_answered",
    "hidden_leases_expired",
    "hidden_leases_without_room",
    "hidden_saves_done",
    "hidden_saves_failed",
    "hidden_saves_started",
    "storages_lost",
    "workers_lost",
)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell whose prefixes do not last in memory; returns its counters."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([100, 300]),
        max_running=chance.randint(1, 4),
        lease_tokens=chance.choice([8, 64]),
        hidden_form=chance.choice(["auto", "auto", "0/1/0", "0/1/0", "0/1/0", "0/0/1"]),
        restoring=chance.choice(["planned", "planned", "planned", HIDDEN, HIDDEN, "kv", "recompute"]),
        prefetch_wait=chance.choice(["best_effort", "deadline", "full"]),
        disk_writes=chance.choice(["through", "through", "selective"]),
        min_prefetch_tokens=1,
        max_attempts=chance.choice([2, 6]),
    )
    page_size = chance.choice([16, 32, 64])
    scale = 64 // page_size
    driver = CellDriver(
        config,
        page_size=page_size,
        workers=chance.randint(1, 2),
        pages=chance.choice([8, 12, 24]) * scale,
        host_pages=chance.choice([6, 12]) * scale,
        disk_chunks=chance.choice([6, 100, 100]),
        hidden_pages=chance.choice([3, 16, 40]) * scale,
    )
    troubles, noises = chance.choice([0.0, 0.03, 0.1]), chance.choice([0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice(TROUBLES + HIDDEN_TROUBLES * 2), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice((*NOISES, "lease_timer", "lease_timer")), chance.randrange(1000))
        elif point < troubles + noises + 0.12:
            tiers = chance.choice([("device", "host")] * 8 + [("device",), ("disk",)])
            driver.flush(tiers, None)
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
            [kind for _ in range(chance.randint(1, 4)) for kind in [chance.randint(0, 1)] * scale],
            chance.randint(0, 3),
            chance.choice([1, 2, 20]),
            salt=chance.choice(["", "", "", "other"]),
            gateway_id=chance.choice(GATEWAYS),
            write=chance.random() < 0.9,
            ignore_eos=chance.random() < 0.7,
        )
    else:
        move(driver, chance, kind)


def test_walks_with_hidden_states_end_well_and_meet_everything() -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
