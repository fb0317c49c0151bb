"""What becomes of each figure and table of a paper here: one entry each, and the tables that are made of them.

Texts about a paper are facts of it. What stands for "here" and the direction follow from committed results, so that no
page can say something that its results do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.papers.claims import TOLERANCE, table, times

Marking = Literal["measured", "simulated", "not run"]
Direction = Literal["yes", "partly", "no", "-"]

Documents = dict[str, dict[str, Any]]
"""Committed results by name, as ``bench/results/<name>.json`` holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One figure, table or stated number of a paper.

    ``direction`` is "-" where nothing was run, or where the paper claims nothing that could be reproduced: inputs, and
    statistics of its data. ``why`` says why it was not run, or why the direction is not the paper's.
    """

    figure: str
    what: str
    paper: str
    marking: Marking
    here: str = ""
    direction: Direction = "-"
    command: str = ""
    where: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper and what is needed to list it. ``drawings`` are figures that show a design and no figure of a result."""

    name: str
    page: str
    title: str
    figures: int
    tables: int
    drawings: dict[str, str]
    results: tuple[str, ...]
    """Names of the results files that its entries and its page are made of."""


def judged(ratios: Sequence[float]) -> Direction:
    """Whether all, some or none of these ratios are above 1: the paper's direction is always written that way."""
    if not ratios:
        raise ValueError("a direction needs a ratio at least")
    above = sum(ratio > 1 + TOLERANCE for ratio in ratios)
    if above == len(ratios):
        return "yes"
    return "partly" if above else "no"


def spread(ratios: Sequence[float]) -> str:
    """``1.20 to 3.40×``, or one number where they are equal as written."""
    low, high = times(min(ratios)), times(max(ratios))
    return low if low == high else f"{low.removesuffix('×')} to {high}"


def figures_table(entries: Iterable[Entry]) -> list[str]:
    """Every entry of a page: a line each."""
    rows = [
        [_linked(each), each.what, each.paper, each.marking, each.here or "-", each.direction, _command(each)]
        for each in entries
    ]
    return table(["in the paper", "what", "paper", "marking", "here", "direction", "command"], rows)


def reasons(entries: Iterable[Entry]) -> list[str]:
    """A line for each entry that has something to explain."""
    return [f"- **{each.figure}, {each.what}** ({_kind(each)}). {each.why}" for each in entries if each.why]


def every_figure(paper: Paper, entries: Sequence[Entry]) -> list[str]:
    """The section that each page begins with."""
    drawn = "; ".join(f"{figure} ({what})" for figure, what in paper.drawings.items())
    explained = reasons(entries)
    return [
        "## Every figure and table",
        "",
        "*Measured* is on a CPU machine with the bundled models, *simulated* is modelled hardware, and no figure of a "
        "GPU was measured. Direction says whether what the paper claims to be better is better here as well, in all, "
        "in some or in none of the compared cases; magnitudes stand beside it.",
        "",
        *figures_table(entries),
        "",
        *([f"Drawings without a result: {drawn}.", ""] if drawn else []),
        *(["### Not run, inputs, and other directions", "", *explained, ""] if explained else []),
    ]


def _kind(entry: Entry) -> str:
    if entry.marking == "not run":
        return "not run"
    return entry.marking if entry.direction == "-" else f"direction: {entry.direction}"


def _linked(entry: Entry) -> str:
    return f"[{entry.figure}]({entry.where})" if entry.where else entry.figure


def _command(entry: Entry) -> str:
    return f"`{entry.command}`" if entry.command else "-"
