"""Seeded walks of tenants with quotas: what is above one goes first, and no copy goes beyond one.

Two namespaces are of one tenant, one of another, and one of nobody. Now and then a quota changes.
"""

from __future__ import annotations

import random

import pytest

from shared.messages.cell_events import CellConfig
from shared.messages.requests import CacheQuota
from tests.stateful.cell_driver import GATEWAYS, NOISES, TROUBLES, VARIANTS, CellDriver
from tests.stateful.cell_model import geometry
from tests.stateful.quota_watch import QuotaWatch
from tests.stateful.walking import move, unmet

WALKS = 100
OWNERS = {"a": "tenant-a", "a, further": "tenant-a", "b": "tenant-b", "": ""}

# What the walks together must have met; otherwise they would prove nothing about it.
MUST_HAPPEN = (
    "backups_done",
    "backups_failed",
    "copied_ahead_pages",
    "device_choices",
    "device_choices_with_somebody_above",
    "evicted_above_quota_nodes",
    "evicted_pages_device",
    "evicted_pages_host",
    "fetches_cancelled",
    "fetches_done",
    "fetches_failed",
    "fetches_without_room",
    "handed_over_pages",
    "hit_tokens_disk",
    "hit_tokens_host",
    "host_admitted_pages",
    "host_choices",
    "host_refused_hotness_pages",
    "host_refused_quota_pages",
    "leases_extended",
    "loads_failed",
    "preemptions",
    "promoted_pages",
    "quotas_changed",
    "requests_resumed",
    "storages_lost",
    "workers_lost",
)


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters and what was watched."""
    chance = random.Random(seed)
    driver = _cell(chance)
    with pytest.MonkeyPatch.context() as patch:
        watch = QuotaWatch(patch)
        changed = _walk(driver, chance, steps, watch)
        _settle(driver, watch)
    driver.finish()  # Which folds all of it again, from its beginning.
    return driver.cell.state.counters | watch.seen | {"quotas_changed": changed}


def _cell(chance: random.Random) -> CellDriver:
    config = CellConfig(
        max_batch_tokens=chance.choice([24, 200]),
        max_running=chance.randint(1, 4),
        max_queued=chance.randint(2, 8),
        lease_tokens=chance.choice([1, 8]),
        reserve_fraction=chance.choice([0.0, 0.3]),
        min_host_load_tokens=chance.choice([1, 20]),
        **{name: chance.choice(values) for name, values in VARIANTS.items()},
    )
    return CellDriver(
        config,
        page_size=chance.choice([1, 4, 16, 64, 64]),
        workers=chance.randint(1, 2),
        pages=chance.choice([8, 10, 16, 24]),
        host_pages=chance.choice([6, 12, 30]),
        disk_chunks=chance.choice([0, 6, 40]),
        has_remote=chance.random() < 0.2,
    )


def _walk(driver: CellDriver, chance: random.Random, steps: int, watch: QuotaWatch) -> int:
    """Do so many things; returns how often a quota was changed."""
    quotas: dict[str, CacheQuota | None] = {owner: _quota(chance, driver, owner) for owner in ("tenant-a", "tenant-b")}
    first_quota = chance.randrange(steps // 2) if chance.random() < 0.3 else 0
    changed = 0
    for step in range(steps):
        known, before = list(watch.quotas), watch.all_host_pages(driver.cell.state)
        point = chance.random()
        if point < 0.04:
            driver.trouble(chance.choice((*TROUBLES, "worker_drains")), chance.randrange(1000))
        elif point < 0.1:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < 0.12:
            owner = chance.choice(list(quotas))
            quotas[owner] = chance.choice([_quota(chance, driver, owner), None])
            changed += 1
        elif point < 0.13:
            driver.flush(chance.choice([("device",), ("host",), ("disk",)]), chance.choice([None, "a", "b"]))
        else:
            _work(driver, chance, quotas if step >= first_quota else {})
        if known == list(watch.quotas):  # Whose KV is counted for the first time may have too much.
            _check_host(driver, watch, before)
    return changed


def _quota(chance: random.Random, driver: CellDriver, owner: str) -> CacheQuota:
    page = geometry(driver.cell.page_size).page_bytes
    return CacheQuota(
        owner=owner,
        device_bytes=chance.choice([0, 1, 2, 3, 5]) * page + chance.choice([0, page // 2]),
        host_bytes=chance.choice([0, 1, 3, 5, 8]) * page,
        disk_bytes=chance.choice([0, 2]) * page,
    )


def _work(driver: CellDriver, chance: random.Random, quotas: dict[str, CacheQuota | None]) -> None:
    kind = chance.choice(["submit", "submit", "all", "worker", "heard", "storage", "storage", "fetch", "promote"])
    if kind == "promote":
        driver.worker_promotes(chance.randrange(1000), chance.random() < 0.5)
        return
    if kind != "submit":
        move(driver, chance, kind)
        return
    salt = chance.choice(list(OWNERS))
    driver.submit(
        [chance.randint(0, 1) for _ in range(chance.randint(1, 5))],
        chance.randint(0, 3),
        chance.randint(1, 6),
        salt=salt,
        tenant=OWNERS[salt],
        quota=quotas.get(OWNERS[salt]),
        gateway_id=chance.choice(GATEWAYS),
        deadline_ms=chance.choice([0, 0, 0, 5]),
        write=chance.random() < 0.9,
    )


def _check_host(driver: CellDriver, watch: QuotaWatch, before: dict[tuple[str, str], int]) -> None:
    """Nobody's copies grew beyond its quota in this step."""
    state = driver.cell.state
    for (owner, storage_id), pages in watch.all_host_pages(state).items():
        most = watch.most_host_pages(state, owner)
        was = before.get((owner, storage_id), pages)
        assert pages <= max(most, was), f"{owner} grew from {was} to {pages} pages in {storage_id}, of {most}"


def _settle(driver: CellDriver, watch: QuotaWatch) -> None:
    """Once nothing runs, what is above a quota goes with the next steps, though nobody needs room."""
    cell = driver.cell
    if not cell.workers:
        cell.add_worker("worker-0", pages=driver.pages)
    for _ in range(200):
        cell.drain()
        if watch.is_settled(cell.state):
            return
        driver.configure(host_tier=True, max_batch_tokens=40)
    raise AssertionError("somebody stays above its quota")


def test_walks_keep_to_quotas_and_meet_everything() -> None:
    """Every choice was checked, every walk ended with everybody within its quota, and all of this happened."""
    assert unmet((walk(seed, 60 + 90 * (seed % 2)) for seed in range(WALKS)), MUST_HAPPEN) == []
