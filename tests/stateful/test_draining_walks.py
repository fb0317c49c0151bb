"""Seeded walks in which workers are asked to end all the time, and others take their places."""

from __future__ import annotations

import random

from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import DRAINS, GATEWAYS, CellDriver
from tests.stateful.walking import move, unmet

WALKS = 40

MUST_HAPPEN = (
    "backups_failed",
    "drains_cut_short",
    "drains_done",
    "finished_length",
    "finished_stop",
    "handed_over_pages",
    "hit_tokens_host",
    "hit_tokens_neighbour",
    "requests_moved_by_drains",
    "requests_resumed",
    "saves_done",
    "storages_lost",
)
"""What the walks together must have met; otherwise they would prove nothing about it."""


def walk(seed: int) -> dict[str, int]:
    """Drive one cell through many drains; returns its counters."""
    chance = random.Random(seed)
    driver = CellDriver(
        CellConfig(
            max_batch_tokens=chance.choice([3, 24, 200]),
            max_running=chance.randint(1, 4),
            lease_tokens=chance.choice([1, 8]),
            admission=chance.choice(["all", "all", "selective", "none"]),
            promotion=chance.choice(["off", "hotness"]),
            neighbour_loads=chance.random() < 0.7,
            disk_writes=chance.choice(["through", "on_evict", "off"]),
            host_writes=chance.choice(["on_evict", "on_evict", "through"]),
        ),
        page_size=chance.choice([1, 4, 64]),
        workers=chance.randint(1, 3),
        pages=chance.choice([8, 16, 24]),
        host_pages=chance.choice([0, 4, 30]),
        disk_chunks=chance.choice([0, 40]),
    )
    for _ in range(80):
        point = chance.random()
        if point < 0.05:
            driver.trouble(DRAINS[0], chance.randrange(1000))
        elif point < 0.08:
            driver.trouble(DRAINS[1], chance.randrange(1000))
        elif point < 0.12:
            driver.trouble("worker_starts", chance.randrange(1000))
        elif point < 0.14:
            driver.trouble(chance.choice(["worker_dies", "storage_dies", "storage_starts"]), chance.randrange(1000))
        elif point < 0.17:
            driver.noise(chance.choice(["cancel", "old_message", "restart", "timer"]), chance.randrange(1000))
        elif point < 0.45:
            driver.submit(
                [chance.randint(0, 1) for _ in range(chance.randint(1, 4))],
                chance.randint(0, 3),
                chance.randint(1, 6),
                gateway_id=chance.choice(GATEWAYS),
                ignore_eos=chance.random() < 0.5,
            )
        else:
            move(driver, chance, chance.choice(["all", "worker", "heard", "storage", "fetch"]))
    driver.finish()
    assert not [worker for worker in driver.cell.state.workers.values() if worker.drain is not None]
    return driver.cell.state.counters


def test_walks_end_well_and_meet_everything() -> None:
    """No token changed or got lost, nothing leaked, every worker that was to leave left, and all of this happened."""
    assert unmet((walk(seed) for seed in range(WALKS)), MUST_HAPPEN) == []
