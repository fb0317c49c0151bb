"""Marks, bars, scales and numbers in frames. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text


class Mark(NamedTuple):
    """The mark of one thing in bars and legends: a letter, for terminals without colours, and a colour."""

    letter: str
    colour: str

    @property
    def style(self) -> str:
        """Rich's style: the letter on its colour, or in reverse without colours."""
        return f"{self.colour} reverse"


SOURCES = {
    "device": Mark("D", "dark_orange"), "neighbour": Mark("N", "magenta"), "host": Mark("H", "yellow"),
    "disk": Mark("S", "cyan"), "remote": Mark("R", "blue"), "hidden": Mark("I", "green"), "sparse": Mark("P", "purple"),
    "lent": Mark("L", "gold3"), "computed": Mark("C", "bright_black"),
}  # fmt: skip
PARTS = {
    "accept": Mark("A", "bright_black"), "broker": Mark("B", "slate_blue1"), "queue": Mark("Q", "yellow"),
    "deferral": Mark("F", "magenta"), "prefetch_wait": Mark("P", "purple"), "load": Mark("L", "cyan"),
    "restore": Mark("R", "green"), "compute": Mark("C", "grey70"), "deliver": Mark("D", "blue"),
}  # fmt: skip
OTHER = Mark("?", "white")


def bar(parts: Sequence[tuple[float, Mark]], whole: float, width: int) -> Text:
    """Return a bar of ``width`` columns with parts of ``whole`` as letters; ends are rounded, so sums do not drift."""
    line = Text()
    done, drawn = 0.0, 0
    for amount, mark in parts:
        done += max(0.0, amount)
        until = min(width, round(width * done / whole)) if whole > 0 else 0
        line.append(mark.letter * (until - drawn), style=mark.style)
        drawn = until
    return line.append("·" * (width - drawn), style="bright_black")


def legend(marks: Mapping[str, Mark], width: int, lead: str = "") -> list[Text]:
    """Return each letter and its name behind ``lead``, in as many lines of ``width`` columns as they take."""
    lines = [Text(lead)]
    for name, mark in marks.items():
        if len(lines[-1]) + len(name) + 2 > width:
            lines.append(Text(" " * len(lead)))
        lines[-1].append(mark.letter, style=mark.style).append(f" {name}  ", style="dim")
    return lines


@dataclass(frozen=True, slots=True)
class LogScale:
    """A logarithmic scale from ``low`` to ``high``, both positive."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> LogScale | None:
        """Return a scale from the power of ten below the least value to the largest; None where none is above 0."""
        positive = [value for value in values if value > 0]
        if not positive:
            return None
        low = 10.0 ** math.floor(math.log10(min(positive)) - 1e-9)
        return cls(low, max(*positive, low * 10))

    def share(self, value: float) -> float:
        """Return the relative position of ``value``, clamped to 0 to 1."""
        if value <= self.low:
            return 0.0
        return min(1.0, math.log(value / self.low) / math.log(self.high / self.low))

    def axis(self, width: int) -> Text:
        """Return a line of ``width`` columns with a tick and its label at each power of ten that has room."""
        cells = [" "] * width
        free, value = 0, self.low
        while value <= self.high:
            at, label = round(self.share(value) * width), f"|{milliseconds(value)}"
            if at >= free and at + len(label) <= width:
                cells[at : at + len(label)] = label
                free = at + len(label) + 1
            value *= 10
        return Text("".join(cells), style="dim")


def milliseconds(ms: float | None) -> str:
    """Return ``12.3 ms``, ``1.20 s``, or ``-`` for None."""
    if ms is None:
        return "-"
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def percent(share: float | None) -> str:
    """Return a share of 0 to 1 as ``85 %``, or ``-`` for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def sum_of(held: Mapping[str, int]) -> int:
    """Return the pages or chunks in all pools of a tier."""
    return sum(held.values())
