"""A policy's work, counted in executed lines of Python: the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from services.scheduler.core.cache.eviction import Policy, make_policy
from shared.messages.cell_events import CellConfig
from thermocline.testing.forest import Forest
from thermocline.testing.registered import registered

_KIT = str(Path(__file__).parent)
_TOKENS = 4  # Per node in these pools.
_LABEL = 3  # A label whose node has that many tokens.


def lines_run(act: Callable[[], None]) -> int:
    """Return how many lines ran in ``act`` outside of this kit. A loop in C, as in ``sorted``, counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename.startswith(_KIT):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def lines_of_churn(policy: type[Policy], nodes: int, events: int) -> int:
    """Return the lines that a policy runs for ``events`` requests in a full pool, see :func:`churn`."""
    forest = _full(policy, nodes)
    return lines_run(lambda: churn(forest, events))


def churned(policy: type[Policy], nodes: int, events: int) -> Forest:
    """Return a full pool of ``nodes`` nodes after ``events`` requests, see :func:`churn`."""
    forest = _full(policy, nodes)
    churn(forest, events)
    return forest


def churn(forest: Forest, events: int) -> None:
    """Serve ``events`` requests in a full pool.

    Every other request reuses a node; the rest add a new one, for which the policy's victim is evicted.
    """
    random, nodes = Random(1), len(forest.nodes)
    ids = list(forest.nodes)
    places = {node_id: place for place, node_id in enumerate(ids)}
    for number in range(events):
        if number % 2:
            forest.ask(forest.nodes[random.choice(ids)], [])
            forest.finish(0)
            continue
        victim = forest.victim()
        if victim is not None:
            place = places.pop(victim.id)
            forest.drop(victim)
            _bring(forest, nodes + number)
            ids[place] = forest.last_id
            places[forest.last_id] = place


def _full(policy: type[Policy], nodes: int) -> Forest:
    with registered(policy):
        forest = Forest(make_policy(policy.name, nodes * _TOKENS, CellConfig()))
    for number in range(nodes):
        _bring(forest, number)
    return forest


def _bring(forest: Forest, number: int) -> None:
    """Run a request that adds one node: the digests of labels that differ by a multiple of four are all different."""
    forest.ask(None, [_LABEL + 4 * number])
    forest.finish(0)
