"""KV or hidden states, for layers that have both, beside given other work: shift from the busiest link to computing.

All begin as KV, which takes no computing. While a link is the busiest resource, layers that it brings as KV are taken
as hidden states instead, as many as make it and whatever gets busier finish together (HCache 4.1.2, with any number
of links). Within one cell that is exact; between cells it is a descent on a convex function, by one or two at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.planner.sources import Cell

_NO_GAIN = 1e-9
"""Relative difference of times that is none."""


@dataclass(slots=True)
class Switch:
    """Layers that can be either; ``hidden`` of ``layers`` are taken as hidden states, the lowest ones."""

    cell: int
    kind: tuple[str, str]  # The source of KV and that of hidden states.
    layers: int
    left: float
    us: list[tuple[int, float]]  # What each resource takes more for a layer that becomes hidden states.
    hidden: float = 0.0


@dataclass(slots=True)
class Assignment:
    """Time of the busiest resource, what each takes, and what was chosen."""

    time_us: float
    loads: list[float]
    switches: list[Switch]


def assign(
    loads: list[float],
    cells: Sequence[Cell],
    stretches: Sequence[tuple[int, Sequence[int]]],
    *,
    whole: bool = True,
) -> Assignment:
    """Restore cells on top of ``loads``, which is changed.

    ``stretches`` are (a set of layers, tokens of each group at them), disjoint in layers. ``whole`` layers, or parts
    of them too: then the time is a lower bound.
    """
    switches: list[Switch] = []
    for number, cell in enumerate(cells):
        for mask, tokens_of in stretches:
            tokens = tokens_of[cell.group]
            layers = cell.layers & mask
            if not tokens or not layers:
                continue
            count = layers.bit_count()
            option = cell.kv or cell.hidden
            assert option is not None
            for place, us in option.us:
                loads[place] += us * tokens * count
            if cell.kv is not None and cell.hidden is not None:
                kind = (cell.kv.source, cell.hidden.source)
                switches.append(Switch(number, kind, layers, count, _difference(cell, tokens)))
    time_us = _descend(loads, switches, whole=whole) if switches else max(loads)
    return Assignment(time_us, loads, switches)


def _difference(cell: Cell, tokens: int) -> list[tuple[int, float]]:
    assert cell.kv is not None
    assert cell.hidden is not None
    change = {place: us * tokens for place, us in cell.hidden.us}
    for place, us in cell.kv.us:
        change[place] = change.get(place, 0.0) - us * tokens
    return list(change.items())


def _descend(loads: list[float], switches: list[Switch], *, whole: bool) -> float:
    """Switch layers as long as the busiest resource gets less busy; returns its time.

    Of switches between the same two sources, which all trade at the same rate, one is looked at after another.
    """
    kinds: dict[tuple[str, str], list[Switch]] = {}
    for switch in reversed(switches):
        kinds.setdefault(switch.kind, []).append(switch)
    time_us = max(loads)
    while loads[0] < time_us:
        busiest = loads.index(time_us)
        best: tuple[float, Switch, float] | None = None
        for line in kinds.values():
            found = _step(loads, line[-1], busiest, whole=whole) if line else None
            if found is not None and found[0] < time_us * (1 - _NO_GAIN) and (best is None or found[0] < best[0]):
                best = (found[0], line[-1], found[1])
        if best is None:
            if _exchange(loads, kinds, busiest, whole=whole):
                time_us = max(loads)
                continue
            if not _give_up_first(kinds, busiest):
                break
            continue
        _, switch, count = best
        _take(loads, switch, count)
        time_us = max(loads)
    return time_us


def _take(loads: list[float], switch: Switch, count: float) -> None:
    switch.left -= count
    switch.hidden += count
    for place, us in switch.us:
        loads[place] += us * count


def _exchange(loads: list[float], kinds: dict[tuple[str, str], list[Switch]], busiest: int, *, whole: bool) -> bool:
    """Two switches at once where neither helps alone, because what the first makes busy the second relieves."""
    heads = [line[-1] for line in kinds.values() if line]
    time_us = max(loads)
    for first in heads if len(heads) > 1 else ():
        if first.left <= 0 or not any(place == busiest and us < 0 for place, us in first.us):
            continue
        count = min(1.0, first.left)
        after = list(loads)
        for place, us in first.us:
            after[place] += us * count
        for second in heads:
            found = None if second is first else _step(after, second, after.index(max(after)), whole=whole)
            if found is not None and found[0] < time_us * (1 - _NO_GAIN):
                _take(loads, first, count)
                _take(loads, second, found[1])
                return True
    return False


def _give_up_first(kinds: dict[tuple[str, str], list[Switch]], busiest: int) -> bool:
    """Pass to the next switch of each kind that could relieve a resource; False where there is none."""
    has_more = False
    for line in kinds.values():
        if line and any(place == busiest and us < 0 for place, us in line[-1].us):
            line.pop()
            has_more = has_more or bool(line)
    return has_more


def _step(loads: list[float], switch: Switch, busiest: int, *, whole: bool) -> tuple[float, float] | None:
    """(Time afterwards, layers to switch) where switching relieves the busiest resource."""
    if switch.left <= 0:
        return None
    slope = 0.0
    for place, us in switch.us:
        if place == busiest:
            slope = us
    if slope >= 0:
        return None
    count = float(switch.left)
    touched = dict(switch.us)
    for place, load in enumerate(loads):
        rise = touched.get(place, 0.0) - slope
        if place != busiest and rise > 0:
            count = min(count, (loads[busiest] - load) / rise)
    if not whole:
        return _after(loads, switch, count), count
    low = float(floor(count + 1e-9))
    high = min(switch.left, low + 1)
    after_low = _after(loads, switch, low) if low else float("inf")
    after_high = _after(loads, switch, high)
    return (after_high, high) if after_high < after_low else (after_low, low)


def _after(loads: list[float], switch: Switch, count: float) -> float:
    after = list(loads)
    for place, us in switch.us:
        after[place] += us * count
    return max(after)
