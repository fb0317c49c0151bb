"""Colours, bars and numbers of the frames. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

SOURCES = {
    "device": "dark_orange", "neighbour": "magenta", "host": "yellow", "disk": "cyan", "remote": "blue",
    "hidden": "green", "sparse": "purple", "lent": "gold3", "computed": "bright_black",
}  # fmt: skip
PARTS = {
    "accept": "bright_black", "broker": "slate_blue1", "queue": "yellow", "deferral": "magenta",
    "prefetch_wait": "purple", "load": "cyan", "restore": "green", "compute": "grey70", "deliver": "blue",
}  # fmt: skip


def bar(parts: Sequence[tuple[float, str]], whole: float, width: int) -> Text:
    """Parts of ``whole`` as blocks of a bar that is ``width`` columns long; ends are rounded, so sums do not drift."""
    line = Text()
    done, drawn = 0.0, 0
    for amount, style in parts:
        done += max(0.0, amount)
        until = min(width, round(width * done / whole)) if whole > 0 else 0
        line.append("█" * (until - drawn), style=style)
        drawn = until
    return line.append("·" * (width - drawn), style="bright_black")


def milliseconds(ms: float | None) -> str:
    """``12.3 ms``, ``1.20 s``, or ``-`` for None."""
    if ms is None:
        return "-"
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def percent(share: float | None) -> str:
    """``85 %``, or ``-`` for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def sum_of(held: Mapping[str, int]) -> int:
    """Pages or chunks in all pools of a tier."""
    return sum(held.values())
