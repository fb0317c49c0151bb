"""A paper's claim as ratios: what it says, what the simulator says, and whether the direction is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.papers.simulated import Row

TOLERANCE = 0.005
"""Ratios this close to 1 say that nothing differs."""

Measure = Callable[[Row], float]


@dataclass(frozen=True, slots=True)
class Claim:
    """``better`` over ``worse`` in some measure is between ``low`` and ``high`` in the paper, over all workloads."""

    text: str
    low: float
    high: float


def ratio(above: float, below: float) -> float:
    """Infinite where only ``below`` is 0; 1 where both are."""
    if below:
        return above / below
    return float("inf") if above else 1.0


def speedup(rows: dict[str, Row], slow: str, fast: str, seconds: Measure) -> float:
    """How many times faster ``fast`` is."""
    return ratio(seconds(rows[slow]), seconds(rows[fast]))


def gain(rows: dict[str, Row], better: str, worse: str, measure: Measure) -> float:
    """How many times more of a measure ``better`` has."""
    return ratio(measure(rows[better]), measure(rows[worse]))


def direction(ratios: Sequence[float]) -> str:
    """Whether all, some or none of these ratios are above 1 by more than the tolerance."""
    above = sum(value > 1 + TOLERANCE for value in ratios)
    if not ratios:
        return "not simulated"
    if above == len(ratios):
        return "yes"
    if above:
        return f"in {above} of {len(ratios)}"
    equal = all(value >= 1 - TOLERANCE for value in ratios)
    return "no difference" if equal else "no"


def paper_range(claim: Claim) -> str:
    """The paper's range, as it is written there."""
    return times(claim.low) if claim.low == claim.high else f"{claim.low:.2f} to {times(claim.high)}"


def times(value: float) -> str:
    if value == float("inf"):
        return "∞"
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def claim_table(workloads: Sequence[str], claims: Iterable[tuple[Claim, Sequence[float]]]) -> list[str]:
    """Markdown lines: one claim a line, with a ratio for each workload."""
    lines = [
        "| claim | paper | " + " | ".join(workloads) + " | direction reproduces |",
        "|---" * (len(workloads) + 3) + "|",
    ]
    for claim, ratios in claims:
        cells = [claim.text, paper_range(claim), *(times(value) for value in ratios), direction(ratios)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Any Markdown table; floats get two decimals below ten, one below a thousand, none above."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(shown(cell) for cell in row) + " |" for row in rows]


def shown(value: object) -> str:
    if isinstance(value, float):
        magnitude = abs(value)
        return f"{value:.2f}" if magnitude < 10 else f"{value:.1f}" if magnitude < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(value: float) -> str:
    return f"{value:.1%}"


def made_by(document: dict[str, Any], *, verb: str = "simulated") -> str:
    """The line that says where the figures come from."""
    hardware = document["hardware"]
    return (
        f"`{document['command']}`, seed {document['seed']}, commit {document['commit']}, {document['date']}; "
        f"{verb} on {hardware['processor']}."
    )
