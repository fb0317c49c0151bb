"""Sections of a page of results: each says what it is about, what was found, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Result = tuple[dict[str, Any], str]
"""Results, and a line that says what they were measured on and how."""

Section = tuple[str, str, Callable[[dict[str, Any]], list[str]]]
"""Name of the result, introduction, and what makes lines of its figures."""


def sections(found: Mapping[str, Result], known: Iterable[Section]) -> list[str]:
    """Parts of the page: a section for each of the results that are there."""
    parts: list[str] = []
    for name, introduction, rows in known:
        if name in found:
            figures, line = found[name]
            parts += [introduction, *rows(figures), "", line, ""]
    return parts


def cost_ratios(way: Mapping[str, Any], *, is_base: bool) -> list[str]:
    """Cells of a way's throughput and CPU time as ratios to another's: medians and the intervals that hold them."""
    ratios = (way["throughput_ratio"], way["cpu_ratio"])
    return ["1" if is_base else f"{one['median']:.3f} ({one['from']:.3f} to {one['to']:.3f})" for one in ratios]
