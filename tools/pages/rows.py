"""How templates find figures: rows by what they hold, and what they hold by its name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""Figures of one thing that was measured, and what tells it from others."""


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Choose the rows that hold all of this."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def column(rows: Iterable[Row], name: str) -> list[Any]:
    """Take one figure of each row that has it."""
    return [row[name] for row in rows if name in row]


def mean(values: Iterable[float]) -> float:
    """Average what a column holds."""
    return statistics.fmean(values)


def by(rows: Iterable[Row], name: str) -> dict[Any, Row]:
    """Find rows by what they hold under a name."""
    return {row[name]: row for row in rows}


def places(rows: Iterable[Row], place: str | Sequence[str], name: str) -> list[dict[Any, Row]]:
    """Put the rows of each place together, by what they hold under ``name``; ``place`` names what tells these apart."""
    names = (place,) if isinstance(place, str) else place
    found: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[each] for each in names), {})[row[name]] = row
    return [found[each] for each in sorted(found)]


def aligned(curves: Mapping[str, Sequence[Row]]) -> list[dict[str, Row]]:
    """Put what curves hold at the same place together, by the curve's name. Raises ValueError where lengths differ."""
    return [dict(zip(curves, found, strict=True)) for found in zip(*curves.values(), strict=True)]


def nested(found: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """Flatten mappings within one another to rows, each with what led to it under these names."""
    if not names:
        return [dict(found)]
    return [{names[0]: key, **row} for key, inner in found.items() for row in nested(inner, *names[1:])]
