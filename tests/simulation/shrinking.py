"""Making a failing scenario smaller: faults, requests and kinds of failure are left out while the defect shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from tests.simulation.running import Outcome, run
from tests.simulation.scenario import Rates, Scenario

MOST_RUNS = 200

T = TypeVar("T")


def shrink(failed: Outcome, most_runs: int = MOST_RUNS) -> Outcome:
    """The smallest run that was found in so many tries and that breaks at the same place."""
    best, runs = failed, 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(best.scenario):
            if runs >= most_runs:
                return best
            runs += 1
            outcome = run(candidate)
            if outcome.signature == failed.signature:
                best, is_smaller = outcome, True
                break
    return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less in them, those that leave out most first."""
    for rate in fields(Rates):
        if getattr(scenario.rates, rate.name) and rate.name != "most_delay_us":
            none: dict[str, Any] = {rate.name: 0.0}
            yield replace(scenario, rates=replace(scenario.rates, **none))
    for faults in _with_less(scenario.faults):
        yield replace(scenario, faults=faults)
    for arrivals in _with_less(scenario.arrivals):
        yield replace(scenario, arrivals=arrivals)
    if scenario.check_every > 1:
        yield replace(scenario, check_every=1)


def _with_less(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    """All but a half, a quarter, ... and at last one."""
    size = len(items)
    while size:
        size = (size + 1) // 2
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        if size == 1:
            return
