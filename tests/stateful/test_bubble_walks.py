"""Seeded walks of cells whose batches are loading-bound, where prefill fills bubbles.

Few long prefixes go back and forth between a small device and a large host pool while short prompts come that are new.
Batches of which a part needs no load are sent in two, and workers carry those out in either order.
"""

from __future__ import annotations

import random

from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import GATEWAYS, NOISES, TROUBLES, VARIANTS, CellDriver
from tests.stateful.walking import move, unmet

WALKS = 30

# What the walks together must have met; otherwise they would prove nothing about it.
MUST_HAPPEN = (
    "batches_in_bubbles",
    "batches_split",
    "bundle_hits",
    "chunks_failed",
    "finished_cancelled",
    "finished_length",
    "loads_failed",
    "preemptions",
    "storages_lost",
    "workers_lost",
)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    varied = {name: chance.choice(values) for name, values in VARIANTS.items()}
    config = CellConfig(
        max_batch_tokens=chance.choice([24, 200]),
        max_running=chance.randint(3, 8),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=chance.choice([1, 8]),
        **varied
        | {
            "admission": "all",
            "bubble_filling": True,
            "bubble_prefill": True,
            "defer_tokens": chance.choice([0, 20]),
            "load_compute_ratio": 0.05,
        },
    )
    driver = CellDriver(
        config,
        page_size=chance.choice([1, 4, 16]),
        workers=chance.randint(1, 2),
        pages=chance.choice([16, 24, 40]),
        host_pages=60,
        disk_chunks=chance.choice([0, 40]),
    )
    troubles = chance.choice([0.0, 0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice(TROUBLES), chance.randrange(1000))
        elif point < troubles + 0.04:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + 0.1:
            driver.flush(("device",), None)
        else:
            _work(driver, chance)
    driver.finish()  # Which folds all of it again, from its beginning.
    return driver.cell.state.counters


def _work(driver: CellDriver, chance: random.Random) -> None:
    kind = chance.choice(["submit", "submit", "submit", "all", "worker", "heard", "storage", "storage"])
    if kind != "submit":
        move(driver, chance, kind)
        return
    for _ in range(chance.randint(1, 4)):
        is_long = chance.random() < 0.6
        driver.submit(
            [chance.randint(0, 1) for _ in range(chance.randint(2, 5) if is_long else 1)],
            chance.randint(1, 3),
            chance.randint(1, 6),
            salt="" if is_long else chance.choice(["", "other"]),
            gateway_id=chance.choice(GATEWAYS),
            deadline_ms=chance.choice([0, 0, 0, 5]),
        )


def test_walks_end_well_in_either_order_of_batches() -> None:
    """Every step kept the invariants, every answer was right, a replay was the same, and all of this happened."""
    assert unmet((walk(seed, 60 + 60 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
