"""What seeded walks have in common: how things move in a cell, and how counters of many walks add up."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.stateful.cell_driver import CellDriver

LOSSES = ("worker_dies", "worker_starts", "worker_starts", "storage_dies", "storage_starts", "storage_starts")
"""Troubles by which pools go and come."""


def move(driver: CellDriver, chance: random.Random, kind: str, *, most_rounds: int = 4) -> None:
    """Something moves: ``all``, a ``worker``, what is ``heard`` of it, or a storage, which may also ``fetch``."""
    if kind == "all":
        driver.everything_moves(chance.randint(1, most_rounds))
    elif kind == "worker":
        driver.worker_steps(chance.randrange(1000), chance.randint(1, 3), chance.random() < 0.5)
    elif kind == "fetch":
        is_heard, is_ok = chance.random() < 0.5, chance.random() < 0.9
        driver.storage_fetches(chance.randrange(1000), chance.randint(1, 3), is_heard, is_ok)
    elif kind == "heard":
        driver.worker_is_heard(chance.randrange(1000), chance.randint(1, 6))
    else:
        driver.storage_steps(chance.random() < 0.5, chance.random() < 0.8)


def added_up(walks: Iterable[dict[str, int]]) -> dict[str, int]:
    """The counters of all walks."""
    found: dict[str, int] = {}
    for counters in walks:
        for name, number in counters.items():
            found[name] = found.get(name, 0) + number
    return found
