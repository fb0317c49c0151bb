"""A paper, and what became of each of its figures and tables here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tools.pages.ratios import Direction

NAMES = ("hotprefix", "strata", "hcache", "impress", "hyperinfer")
"""Of the papers: ``docs/templates/papers/NAME.j2`` sets ``paper``, and ``docs/results/NAME.md`` shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One figure, table or stated number of a paper.

    ``direction`` is "-" where nothing was run, or where the paper claims nothing that could be reproduced: inputs, and
    statistics of its data. ``why`` says why it was not run, or why the direction is not the paper's; where it is the
    paper's, there is nothing to explain. ``where`` is the place that tells of it, relative to ``docs/results``.
    """

    figure: str
    what: str
    paper: str
    marking: Literal["measured", "simulated", "not run"]
    here: str = ""
    direction: Direction = "-"
    command: str = ""
    where: str = ""
    why: str = ""

    @property
    def kind(self) -> str:
        """What is to be explained of it."""
        return self.marking if self.direction == "-" else f"direction: {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper of so many figures and tables. ``drawings`` are figures that show a design and no figure of a result."""

    name: str
    page: str
    figures: int
    tables: int
    drawings: dict[str, str]
    entries: list[Entry]

    def link(self, entry: Entry) -> str:
        """Where an entry is told of, as seen from the index."""
        return entry.where if entry.where and not entry.where.startswith("#") else f"{self.page}{entry.where}"

    def count(self, field: Literal["marking", "direction"]) -> Counter[str]:
        """How many entries there are of each kind."""
        return Counter(getattr(entry, field) for entry in self.entries)
