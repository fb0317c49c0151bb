"""Seeded walks of conversations whose turns leave holes in their hidden states: restored, computed, and in trouble."""

from __future__ import annotations

import random

from shared.messages.cell_events import CellConfig
from shared.messages.pools import HIDDEN
from tests.stateful.cell_driver import GATEWAYS, HIDDEN_TROUBLES, NOISES, CellDriver
from tests.stateful.walking import unmet

WALKS = 30
TALKS, MOST_TOKENS = 4, 900
MANY_TROUBLES = (
    "worker_dies",
    "worker_starts",
    "storage_dies",
    "storage_starts",
    *["chunk_fails"] * 3,
    *HIDDEN_TROUBLES,
)

MUST_HAPPEN = (
    "chunks_failed",
    "fetch_deadlines",
    "restored_tokens",
    "restores_refused",
    "saved_hidden_chunks",
    "hidden_fetches_cancelled",
    "hidden_fetches_failed",
    "hidden_holes_passed",
    "hidden_holes_planned",
    "hidden_runs_extended",
    "hidden_runs_without_room",
    "storages_lost",
    "workers_lost",
)


class Talk:
    """A conversation: each turn goes on behind the answer to the one before."""

    def __init__(self, number: int) -> None:
        self.number, self.words, self.last = number, 0, ""
        self.tokens: list[int] = []

    def says(self, driver: CellDriver, chance: random.Random) -> None:
        """The next turn, if the last one is over; a talk that is long enough begins anew."""
        gateway = GATEWAYS[self.number % 2]
        if self.last in driver.cell.gateway(gateway).open:
            return
        answer = driver.cell.gateway(gateway).tokens.get(self.last, [])
        self.tokens += answer
        if len(self.tokens) > MOST_TOKENS:
            self.tokens, self.number = [], self.number + TALKS
        more = chance.randint(40, 300)
        self.tokens += range(self.number * 10_000 + self.words, self.number * 10_000 + self.words + more)
        self.words += more
        self.last = driver.cell.submit(
            list(self.tokens),
            max_tokens=chance.choice([1, 10, 60]),
            gateway_id=GATEWAYS[self.number % 2],
            ignore_eos=True,
        )


def walk(seed: int, steps: int) -> dict[str, int]:
    """Drive one cell; returns its counters."""
    chance = random.Random(seed)
    page_size = chance.choice([16, 32, 64])
    config = CellConfig(
        max_batch_tokens=chance.choice([30, 100, 1000]),
        max_running=chance.randint(1, 4),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=chance.choice([8, 64]),
        hidden_form="0/1/0",
        restoring=chance.choice(["planned", "planned", HIDDEN]),
        prefetch_wait=chance.choice(["best_effort", "deadline", "full", "full"]),
        defer_tokens=chance.choice([0, 2]),
        min_prefetch_tokens=chance.choice([1, 200]),
        max_attempts=chance.choice([2, 6]),
    )
    driver = CellDriver(
        config,
        page_size=page_size,
        workers=chance.randint(1, 2),
        pages=chance.choice([1400, 2800]) // page_size,
        host_pages=chance.choice([640, 1280]) // page_size,
        disk_chunks=chance.choice([20, 200, 200]),
        hidden_pages=chance.choice([128, 512, 4096]) // page_size,
    )
    talks = [Talk(number) for number in range(TALKS)]
    troubles, noises = chance.choice([0.0, 0.03, 0.12]), chance.choice([0.02, 0.08])
    for _ in range(steps):
        point = chance.random()
        if point < troubles:
            driver.trouble(chance.choice(MANY_TROUBLES), chance.randrange(1000))
        elif point < troubles + noises:
            driver.noise(chance.choice(NOISES), chance.randrange(1000))
        elif point < troubles + noises + 0.18:
            driver.flush(chance.choice([("device", "host")] * 8 + [("device",), ("device", "host", "disk")]), None)
        elif point < troubles + noises + 0.22:
            driver.everything_moves(80)
        else:
            work(driver, chance, talks)
    driver.finish()
    return driver.cell.state.counters


def work(driver: CellDriver, chance: random.Random, talks: list[Talk]) -> None:
    """Somebody says something, or something moves."""
    kind = chance.choice(["says", "says", "says", "all", "worker", "heard", "storage", "fetch"])
    if kind == "says":
        chance.choice(talks).says(driver, chance)
    elif kind == "all":
        driver.everything_moves(chance.randint(1, 3))
    elif kind == "worker":
        driver.worker_steps(chance.randrange(1000), chance.randint(1, 3), chance.random() < 0.5)
    elif kind == "heard":
        driver.worker_is_heard(chance.randrange(1000), chance.randint(1, 6))
    elif kind == "storage":
        driver.storage_steps(chance.random() < 0.7, chance.random() < 0.9)
    else:
        is_heard, is_ok = chance.random() < 0.6, chance.random() < 0.93
        driver.storage_fetches(chance.randrange(1000), chance.randint(1, 3), is_heard, is_ok)
        if chance.random() < 0.1:  # Before the worker has seen what was brought.
            driver.trouble("every_hidden_page_rots", 0)


def test_walks_with_conversations_end_well_and_meet_everything() -> None:
    """Every walk ended without a wrong read, a leak or a stuck request, and all of this happened on the way."""
    assert unmet((walk(seed, 150) for seed in range(WALKS)), MUST_HAPPEN) == []
