"""What seeded walks have in common: how things move in a cell, and how counters of many walks add up."""

from __future__ import annotations

import random
from collections.abc import Iterable

from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import VARIANTS, CellDriver

LOSSES = ("worker_dies", "worker_starts", "worker_starts", "storage_dies", "storage_starts", "storage_starts")
"""Troubles by which pools go and come."""


def drawn_config(chance: random.Random, *, bubble_prefill: bool = False) -> CellConfig:
    """Settings of a small cell that restores from hidden states, in one of its variants."""
    return CellConfig(
        max_batch_tokens=chance.choice([24, 200]),
        max_running=chance.randint(1, 4),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=chance.choice([1, 8]),
        min_host_load_tokens=1,
        max_attempts=chance.choice([2, 6]),
        hidden_form="0/1/0",
        bubble_prefill=bubble_prefill,
        **{name: chance.choice(values) for name, values in VARIANTS.items()},
    )


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


def unmet(walks: Iterable[dict[str, int]], names: Iterable[str]) -> list[str]:
    """Which of these counters no walk has raised; all are walked."""
    met = {name for counters in walks for name, count in counters.items() if count > 0}
    return [name for name in names if name not in met]
