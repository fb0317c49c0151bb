"""Seeded walks of conversations at workers that keep texts: referred to, dropped, and lost against all promises."""

from __future__ import annotations

import random

from tests.small_blocks import small_blocks
from tests.stateful.cell_driver import DRAINS, GATEWAYS, NOISES, TROUBLES, CellDriver
from tests.stateful.walking import drawn_config, move, unmet

WALKS = 60
TALKS, MOST_TOKENS = 5, 200

MUST_HAPPEN = (
    "chunks_failed",
    "evicted_pages_device",
    "failed_cancelled",
    "hidden_leases_answered",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_neighbour",
    "preemptions",
    "referred_tokens",
    "requests_resumed",
    "texts_missing",
    "workers_lost",
)


def says(driver: CellDriver, chance: random.Random, talks: dict[int, list[int]], most: int) -> None:
    """A turn of some conversation: what was said before, sometimes less of it, and a few tokens more."""
    number = chance.randrange(TALKS)
    before = talks.get(number, [number % 2] * 9)
    if len(before) > MOST_TOKENS:
        before = []
    before = before[: chance.choice([len(before)] * 4 + [len(before) // 2])]
    talks[number] = before + [chance.randrange(500) for _ in range(chance.randint(1, most))]
    driver.cell.submit(
        list(talks[number]),
        max_tokens=chance.choice([1, 4, 12]),
        gateway_id=GATEWAYS[number % 2],
        salt=chance.choice(["", "", "", "other"]),
        ignore_eos=True,
    )


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    keeps_hidden = seed % 4 == 0
    driver = CellDriver(
        drawn_config(chance, bubble_prefill=seed % 2 == 1),
        page_size=16 if keeps_hidden else chance.choice([1, 4, 6, 16]),
        workers=chance.randint(1, 2),
        pages=chance.choice([40, 60, 100]),
        host_pages=30 if keeps_hidden else chance.choice([0, 30, 90]),
        disk_chunks=40 if keeps_hidden else chance.choice([0, 40]),
        hidden_pages=128 if keeps_hidden else 0,
        kept_tokens=chance.choice([60, 200, 1_000]),
        takes_compact=seed % 3 > 0,
    )
    talks: dict[int, list[int]] = {}
    troubles, noises = chance.choice([0.0, 0.02, 0.1]), chance.choice([0.02, 0.1])
    for _ in range(steps):
        point = chance.random()
        if point < troubles and chance.random() < 0.3:
            driver.texts_are_lost(chance.randrange(1000))
        elif point < troubles:
            driver.trouble(chance.choice((*TROUBLES, *DRAINS)), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.3:
            says(driver, chance, talks, 60 if keeps_hidden else 12)
        else:
            move(driver, chance, chance.choice(["all", "worker", "heard", "storage", "fetch"]))
    driver.finish()
    if not troubles:
        check_mirrors(driver)
    return driver.cell.state.counters


def check_mirrors(driver: CellDriver) -> None:
    """At rest each worker keeps what the scheduler thinks, and what it is about to be told to forget."""
    for worker in driver.cell.state.workers.values():
        kept = driver.cell.workers[worker.worker_id].texts
        assert len(kept) == len(worker.texts.texts) + len(worker.texts.dropped)
        assert worker.texts.dropped or kept.tokens == worker.texts.tokens <= worker.texts.most_tokens


def test_walks_with_kept_texts_end_well_and_meet_everything() -> None:
    """Every walk ended with the right tokens and nothing lost, replayed alike, and all of this happened on the way."""
    with small_blocks(8):
        assert unmet((walk(seed, 150) for seed in range(WALKS)), MUST_HAPPEN) == []
