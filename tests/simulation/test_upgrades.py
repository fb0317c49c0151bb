"""A cell whose scheduler is exchanged for another release, which decides differently, again and again under load."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.scheduler.leadership import Tail
from tests.simulation.drawing import draw
from tests.simulation.faults import UPGRADE
from tests.simulation.running import Outcome, run
from tests.simulation.scenario import Fault, Scenario

SEEDS = range(40)
UPGRADES = 3


def upgraded(seed: int) -> Scenario:
    """The scenario of a seed; while requests come, other releases take over from schedulers that stop or are killed."""
    scenario = draw(seed)
    chance = random.Random(f"{seed}/upgrades")
    end_us = max((arrival.at_us for arrival in scenario.arrivals), default=0)
    faults = [
        Fault(chance.randint(0, end_us), UPGRADE, chance.randrange(1_000), chance.choice([1_000, 400_000]))
        for _ in range(UPGRADES)
    ]
    return replace(scenario, faults=tuple(sorted([*scenario.faults, *faults], key=lambda each: each.at_us)))


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(upgraded(seed)) for seed in SEEDS]


def test_no_release_breaks_what_another_began(outcomes: list[Outcome]) -> None:
    """Answers are right, everything ends, nothing leaks, and what each release folded is said again in a replay."""
    assert [(outcome.scenario.seed, outcome.broken) for outcome in outcomes if outcome.broken] == []


def test_both_ways_of_an_upgrade_are_met(outcomes: list[Outcome]) -> None:
    """Some state is continued by another release, and some is given up."""
    seen = sum((Counter(outcome.seen) for outcome in outcomes), Counter[str]())

    assert seen["schedulers_that_began_anew"] > 0
    assert seen["schedulers_that_continued_another"] > 0


def test_going_on_from_what_another_release_decided_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties are broken where the tail of another release is folded again."""
    monkeypatch.setattr(Tail, "may_be_continued", lambda tail, seq, release: True)

    assert any(run(upgraded(seed)).broken for seed in SEEDS)
