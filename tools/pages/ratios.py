"""Ratios of figures to one another, and whether they say what a paper says."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

TOLERANCE = 0.005
"""Ratios this close to 1 say that nothing differs."""

Direction = Literal["yes", "partly", "no", "-"]


def ratio(above: float, below: float) -> float:
    """Divide; infinite where only ``below`` is 0, and 1 where both are."""
    if below:
        return above / below
    return float("inf") if above else 1.0


def over(rows: Iterable[Mapping[Any, Any]], above: Hashable, below: Hashable, figure: str | None = None) -> list[float]:
    """Divide what each row holds under one name by what it holds under another, or the ``figure`` of either.

    Where ``above`` or ``below`` is a tuple of names, each of the first is divided by each of the second.
    """
    pairs = [(first, second) for first in _all(above) for second in _all(below)]
    if figure is None:
        return [ratio(row[first], row[second]) for row in rows for first, second in pairs]
    return [ratio(row[first][figure], row[second][figure]) for row in rows for first, second in pairs]


def _all(names: Hashable) -> tuple[Hashable, ...]:
    return names if isinstance(names, tuple) else (names,)


def judged(ratios: Sequence[float]) -> Direction:
    """Say whether all, some or none of these ratios are above 1: the paper's direction is always written that way."""
    if not ratios:
        raise ValueError("a direction needs a ratio at least")
    above = sum(each > 1 + TOLERANCE for each in ratios)
    if above == len(ratios):
        return "yes"
    return "partly" if above else "no"


def counted(ratios: Sequence[float]) -> str:
    """Say the same with how many are above 1, and whether the others are below it or equal."""
    above = sum(each > 1 + TOLERANCE for each in ratios)
    if 0 < above < len(ratios):
        return f"in {above} of {len(ratios)}"
    if above:
        return "yes"
    return "no difference" if all(each >= 1 - TOLERANCE for each in ratios) else "no"
