"""Seeded walks in which pools are lost that are struck a node or two at a time, while everything else goes on."""

from __future__ import annotations

import random

import pytest

from services.scheduler.core.cache import residency
from services.scheduler.core.fold import configure
from services.scheduler.core.members import pools
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import GATEWAYS, NOISES, VARIANTS, CellDriver
from tests.stateful.walking import LOSSES, move, unmet

WALKS = 60

MUST_HAPPEN = (
    "backups_done",
    "evicted_pages_device",
    "evicted_pages_host",
    "finished_length",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_neighbour",
    "joins_put_off",
    "loads_failed",
    "promoted_pages",
    "requests_resumed",
    "saves_done",
    "storages_lost",
    "workers_lost",
    # What the walks themselves saw of pools that were lost and not struck yet.
    "a_flush_goes_on",
    "a_hit_meanwhile",
    "a_node_made_meanwhile",
    "a_restart_meanwhile",
    "both_tiers_lost",
    "several_lost",
    "unreached_copies",
    "storage_back_before_struck",
    "worker_back_before_struck",
)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters, and how often it met what only walks with slices do."""
    chance = random.Random(seed)
    config = CellConfig(
        max_batch_tokens=chance.choice([24, 200]),
        max_running=chance.randint(1, 4),
        lease_tokens=chance.choice([1, 8]),
        min_host_load_tokens=1,
        max_attempts=6,
        **{name: chance.choice(values) for name, values in VARIANTS.items()},
    )
    driver = CellDriver(
        config,
        page_size=chance.choice([1, 4, 16, 32]),
        workers=chance.randint(1, 3),
        pages=chance.choice([10, 16, 24]),
        host_pages=chance.choice([6, 30, 60]),
        disk_chunks=chance.choice([0, 40]),
        has_remote=chance.random() < 0.2,
    )
    met: dict[str, int] = {}
    losses = chance.choice([0.03, 0.1])
    for _ in range(steps):
        met["a_flush_goes_on"] = met.get("a_flush_goes_on", 0) + bool(driver.cell.state.flushes)
        met["unreached_copies"] = met.get("unreached_copies", 0) + any(
            key.startswith(residency.UNREACHED) for key in driver.cell.state.lost
        )
        before = dict(driver.cell.state.counters), driver.cell.state.tree.next_id
        is_lost = bool(driver.cell.state.lost)
        point = chance.random()
        if point < losses:
            driver.trouble(chance.choice(LOSSES), chance.randrange(1000))
        elif point < losses + 0.05:
            noise = chance.choice(NOISES)
            met["a_restart_meanwhile"] = met.get("a_restart_meanwhile", 0) + (is_lost and noise == "restart")
            driver.noise(noise, chance.randrange(1000))
        elif point < losses + 0.08:
            driver.flush(chance.choice([("device",), ("host",), ("device", "host")]), None)
        elif point < losses + 0.4:
            driver.submit(
                [chance.randint(0, 1) for _ in range(chance.randint(1, 5))],
                chance.randint(0, 3),
                chance.randint(1, 6),
                gateway_id=chance.choice(GATEWAYS),
            )
        else:
            move(
                driver,
                chance,
                chance.choice(["all", "worker", "worker", "heard", "storage", "storage", "fetch"]),
                most_rounds=1,
            )
        if is_lost:
            _note(driver, before, met)
    driver.finish()
    return driver.cell.state.counters | met


def _note(driver: CellDriver, before: tuple[dict[str, int], int], met: dict[str, int]) -> None:
    state = driver.cell.state
    counters, next_id = before

    def grown(name: str) -> bool:
        return state.counters.get(name, 0) > counters.get(name, 0)

    owners = [key.partition("/") for key in state.lost]
    seen = {
        "a_hit_meanwhile": grown("hit_tokens_device") or grown("hit_tokens_host"),
        "a_node_made_meanwhile": state.tree.next_id > next_id,
        "both_tiers_lost": len({tier for tier, _, _ in owners}) == 2,
        "several_lost": len(owners) > 1,
        "storage_back_before_struck": any(tier == "host" and name in state.storages for tier, _, name in owners),
        "worker_back_before_struck": bool(state.arriving),
    }
    for name, is_so in seen.items():
        met[name] = met.get(name, 0) + is_so


def test_walks_with_losses_in_slices_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    monkeypatch.setattr(pools, "STRIKE_UNITS", 3)
    monkeypatch.setattr(configure, "FLUSH_UNITS", 4)
    monkeypatch.setattr(residency, "MOST_PRUNED", 0)
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
