"""Leaves of one frequency and one length."""

import random
from typing import Any

from services.scheduler.policies.aging_group import AgingGroup, enter, first


def put(
    group: AgingGroup, known: dict[int, tuple[int, int, int, int]], node_id: int, runs_out: int, last_use: int
) -> None:
    known[node_id] = (group.frequency, group.length, runs_out, last_use)
    enter(group, node_id, known[node_id], known)


def test_the_first_is_the_one_whose_clock_runs_out_first_and_then_the_one_used_longest_ago() -> None:
    """Clocks stop at 0, so leaves whose clocks have run out are told apart by their last use alone."""
    group = AgingGroup(1, 16)
    known: dict[int, Any] = {}
    put(group, known, 1, 7, 5)
    put(group, known, 2, 9, 3)

    assert first(group, 6, known) == 1
    assert first(group, 8, known) == 1
    assert first(group, 9, known) == 2


def test_it_agrees_with_a_look_at_all_leaves() -> None:
    """Whatever comes, changes, goes and ages; and void entries do not pile up."""
    chance = random.Random(3)
    group = AgingGroup(2, 32)
    known: dict[int, Any] = {}
    ages = 0
    for step in range(3000):
        node_id = chance.randrange(40)
        if node_id in known:
            group.size -= 1
            del known[node_id]
        if chance.random() < 0.7:
            put(group, known, node_id, ages + chance.randrange(12), step)
        ages += chance.random() < 0.2

        least = min(((max(0, out - ages), used, name) for name, (_, _, out, used) in known.items()), default=None)
        assert first(group, ages, known) == (least[2] if least else None)
        assert len(group.warm) + len(group.cold) <= 2 * len(known) + 64
