"""How pages write numbers and tables: the filters of their templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def fixed(value: float, digits: int = 0) -> str:
    """Write ``1234.5`` with this many decimals."""
    return f"{value:.{digits}f}"


def number(value: float, digits: int = 0) -> str:
    """Write ``1,234.5``."""
    return f"{value:,.{digits}f}"


def percent(value: float, digits: int = 0) -> str:
    """Write a share of 1 as ``12%``."""
    return f"{value:.{digits}%}"


def signed(value: float, digits: int = 1) -> str:
    """Write a difference in percent, with its sign."""
    return f"{round(value, digits + 2) + 0.0:+.{digits}%}"  # Adding nothing takes the sign from a zero.


def times(value: float) -> str:
    """Write a ratio as ``1.23×``, or ``12×`` from ten on."""
    if value == float("inf"):
        return "∞"
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def interval(found: Mapping[str, float]) -> str:
    """Write a median with the interval that holds it: ``1.003 (0.938 to 1.062)``."""
    return f"{found['median']:.3f} ({found['from']:.3f} to {found['to']:.3f})"


def to(values: Iterable[float], digits: int = 2, unit: str = "") -> str:
    """Write the least and the largest, with the unit behind the second: ``1.20 to 3.40×``."""
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}{unit}"


def spread(ratios: Sequence[float]) -> str:
    """Write the least and the largest ratio, or one where both look alike: ``1.20 to 3.40×``."""
    low, high = times(min(ratios)), times(max(ratios))
    return low if low == high else f"{low.removesuffix('×')} to {high}"


def cell(value: object) -> str:
    """Write any cell: floats with two decimals below ten, one below a thousand, none above; integers with commas."""
    if isinstance(value, float):
        magnitude = abs(value)
        return f"{value:.2f}" if magnitude < 10 else f"{value:.1f}" if magnitude < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def row(cells: Iterable[object]) -> str:
    """Write a line of a Markdown table."""
    return f"| {' | '.join(cell(each) for each in cells)} |"


def head(titles: Iterable[object]) -> str:
    """Write the two lines that a Markdown table begins with."""
    found = list(titles)
    return f"{row(found)}\n{'|---' * len(found)}|"


def origin(document: Mapping[str, Any]) -> str:
    """Write what a result was measured on, and how."""
    hardware = document["hardware"]
    return (
        f"`{document['command']}`, commit {document['commit']}, {document['date']}, {hardware['processor']}, "
        f"{hardware['cores']} cores, {hardware['memory_gib']} GiB"
    )
