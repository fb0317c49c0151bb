"""Leaves of one frequency and one length, whose order by priority stays as it is while all clocks go down together.

The priority does not fall as the clock rises, so the leaf whose clock runs out first goes first. Clocks stop at 0:
leaves whose clocks have run out are equal, and the least recently used of them goes first. When a clock runs out is
noted as a number of agings, which does not change with time, so aging touches no leaf; each is moved once.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

Values = tuple[int, int, int, int]
"""Frequency, length, the number of agings at which the clock has run out (0: it has), and last use."""

_SPARE = 16  # Void entries that a small group may hold.


class AgingGroup(msgspec.Struct):
    """Two heaps; an entry is void where the leaf's values say otherwise. ``size`` counts leaves."""

    frequency: int
    length: int
    size: int = 0
    warm: list[tuple[int, int, int]] = []  # When the clock runs out, last use, node id.
    cold: list[tuple[int, int, int]] = []  # Last use, node id, when the clock had run out.


def enter(group: AgingGroup, node_id: int, values: Values, known: Mapping[int, Values]) -> None:
    """Add a leaf; ``known`` has its ``values`` already. Rebuilds the heaps where most of their entries are void."""
    _, _, runs_out, last_use = values
    group.size += 1
    heappush(group.warm, (runs_out, last_use, node_id))
    if len(group.warm) + len(group.cold) <= 2 * group.size + _SPARE:
        return
    group.warm = [entry for entry in dict.fromkeys(group.warm) if _is_valid(group, known, *entry)]
    group.cold = [
        (last_use, known_id, runs_out)
        for last_use, known_id, runs_out in dict.fromkeys(group.cold)
        if _is_valid(group, known, runs_out, last_use, known_id)
    ]
    heapify(group.warm)
    heapify(group.cold)


def first(group: AgingGroup, ages: int, known: Mapping[int, Values]) -> int | None:
    """Return the leaf that goes first after ``ages`` agings, or None where none is left. It stays in the group."""
    warm, cold = group.warm, group.cold
    while warm:
        runs_out, last_use, node_id = warm[0]
        is_valid = _is_valid(group, known, runs_out, last_use, node_id)
        if is_valid and runs_out > ages:
            break
        heappop(warm)
        if is_valid:
            heappush(cold, (last_use, node_id, runs_out))
    while cold:
        last_use, node_id, runs_out = cold[0]
        if _is_valid(group, known, runs_out, last_use, node_id):
            return node_id
        heappop(cold)
    return warm[0][2] if warm else None


def _is_valid(group: AgingGroup, known: Mapping[int, Values], runs_out: int, last_use: int, node_id: int) -> bool:
    return known.get(node_id) == (group.frequency, group.length, runs_out, last_use)
