"""Seeded walks of cells whose adapters come, go, change names and fail to load, while everything else goes wrong."""

from __future__ import annotations

import random

from services.scheduler.core.adapters import find
from shared.messages.cell_events import LoadAdapter, UnloadAdapter
from tests.stateful.cell_driver import DRAINS, NOISES, TROUBLES, CellDriver
from tests.stateful.walking import drawn_config, move, unmet

WALKS = 40
DIGESTS = tuple(str(number) * 32 for number in range(1, 4))
NAMES = ("a", "b")

MUST_HAPPEN = (
    "adapters_attached",
    "adapters_failed",
    "adapters_loaded",
    "adapters_moved",
    "adapters_refused",
    "adapters_unloaded",
    "failed_service_unavailable",
    "hidden_leases_answered",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_neighbour",
    "preemptions",
    "refused_model_not_found",
    "requests_resumed",
    "requests_stolen",
    "workers_lost",
)


def orders(driver: CellDriver, chance: random.Random) -> None:
    """An operator does something with adapters."""
    name, digest = chance.choice(NAMES), chance.choice(DIGESTS)
    if chance.random() < 0.3:
        driver.cell.feed(UnloadAdapter(name=name, digest=chance.choice(["", "", digest])))
    else:
        path = chance.choice(["folder", "folder", "folder", "bad folder"])
        named = find(driver.cell.state, name)
        expects = chance.choice([None, "", *[named.digest] * 4] if named is not None else [None, "", digest])
        driver.cell.feed(LoadAdapter(name=name, path=path, digest=digest, expects=expects))


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    keeps_hidden = seed % 4 == 0
    driver = CellDriver(
        drawn_config(chance),
        page_size=16 if keeps_hidden else chance.choice([1, 4, 6, 16]),
        workers=chance.randint(1, 3),
        pages=chance.choice([12, 20, 40]),
        host_pages=30 if keeps_hidden else chance.choice([0, 30]),
        disk_chunks=40 if keeps_hidden else chance.choice([0, 40]),
        hidden_pages=128 if keeps_hidden else 0,
        kept_tokens=chance.choice([0, 200]),
    )
    troubles, noises = chance.choice([0.0, 0.02, 0.1]), chance.choice([0.02, 0.1])
    driver.cell.most_adapters = chance.choice([1, 2, 99])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice((*TROUBLES, *DRAINS)), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.06:
            orders(driver, chance)
        elif point < troubles + noises + 0.35:
            shape = [chance.randrange(3) for _ in range(chance.randint(1, 4))]
            adapter = chance.choice(["", *driver.cell.state.adapters, *DIGESTS[:1]])
            driver.submit(shape, chance.randrange(3), chance.choice([1, 4, 24]), adapter=adapter)
        else:
            move(driver, chance, chance.choice(["all", "worker", "heard", "storage", "fetch"]))
    driver.finish()
    return driver.cell.state.counters


def test_walks_with_adapters_end_well_and_meet_everything() -> None:
    """Every walk ended with the right tokens and nothing lost, replayed alike, and all of this happened on the way."""
    assert unmet((walk(seed, 150) for seed in range(WALKS)), MUST_HAPPEN) == []
