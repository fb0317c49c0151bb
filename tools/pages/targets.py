"""Targets that committed results were measured against, each with what was reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = {
    "target_p99_ms": ("broker_and_scheduler_ms", "p99", "broker and scheduler, p99"),
    "target_take_over_p99_ms": ("take_over_ms", "p99", "a standby takes over, p99"),
    "target_longest_pause_p99_ms": ("longest_pause_ms", "p99", "longest pause of a stream whose worker is killed, p99"),
    "target_many_streams_ttft_p50_ms": ("many_streams_ttft_ms", "p50", "TTFT of 256 streams at once, p50"),
    "target_known_text_ms": ("known_ms", "p50", "tokens of a text of 130,126, all but 100 of them known, p50"),
    "target_loop_pause_p100_ms": ("loop_pause_ms", "p100", "longest pause of a gateway whose clients are hostile"),
    "target_cached_ttft_p50_ms": ("ttft_ms", "p50", "TTFT of the longest cached prompt, p50"),
    "target_idle_first_step_p50_ms": ("first_step_ms", "p50", "HTTP request to the worker's first step, idle, p50"),
    "target_idle_first_step_p99_ms": ("first_step_ms", "p99", "HTTP request to the worker's first step, idle, p99"),
    "target_idle_delivered_p50_ms": ("delivered_ms", "p50", "sampled token to the client, idle, p50"),
    "target_busy_first_step_p50_ms": (
        "first_step_ms",
        "p50",
        "HTTP request to the worker's first step, beside eight streams, p50",
    ),
    "target_busy_first_step_p99_ms": (
        "first_step_ms",
        "p99",
        "HTTP request to the worker's first step, beside eight streams, p99",
    ),
    "target_busy_delivered_p50_ms": ("delivered_ms", "p50", "sampled token to the client, beside eight streams, p50"),
}
"""By the name of a target in milliseconds: the spread of which it bounds a figure, and what a reader calls it."""

RATIOS = {
    "target_neighbour_over_host": ("neighbour_over_host", "≤", "TTFT from a neighbour's host memory over one's own"),
    "target_recomputed_over_neighbour": (
        "recomputed_over_neighbour",
        "≥",
        "TTFT of computing over a neighbour's host memory",
    ),
    "target_of_one_node": ("of_one_node", "≥", "least hit ratio of nodes that share over one node with as much memory"),
}
"""By the name of a target that is a ratio: the figure that it bounds, from which side, and what a reader calls it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One target: ``measured`` and ``wanted`` are ``1.33×`` and ``≥ 3×``, or ``3.3 ms`` and ``≤ 2 ms``."""

    result: str
    says: str
    measured: str
    wanted: str
    is_met: bool


def read(results: Path) -> list[Target]:
    """Read all targets of the results in a folder, by file. Raises KeyError for a kind of target not known here."""
    found: list[Target] = []
    for file in sorted(results.glob("*.json")):
        found += of(file.stem, json.loads(file.read_text(encoding="utf-8")))
    return found


def of(result: str, document: Any) -> Iterator[Target]:
    """Find the targets in one result, wherever they stand in it."""
    if isinstance(document, list):
        for one in document:
            yield from of(result, one)
    if not isinstance(document, dict):
        return
    for name, value in document.items():
        if name in RATIOS:
            yield _bounded(result, document, name)
        elif name.startswith("target_"):
            yield _longest(result, document, name)
        elif name == "targets":
            yield from (_beside(result, document, row) for row in value)
        elif isinstance(value, dict) and "target" in value:
            yield _ratio(result, name.replace("_", " "), value["ratio"], value["target"])
        else:
            yield from of(result, value)


def _beside(result: str, run: dict[str, Any], row: dict[str, Any]) -> Target:
    says = f"{row['says']}: {run['systems'][row['ours']]['title']} over {run['systems'][row['peer']]['title']}"
    return _ratio(result, f"{says}, {run['model']} model", row["ratio"], row["target"])


def _ratio(result: str, says: str, ratio: float, wanted: float) -> Target:
    return Target(result, says, f"{ratio:.2f}×", f"≥ {wanted:g}×", ratio >= wanted)


def _bounded(result: str, figures: dict[str, Any], name: str) -> Target:
    figure, side, says = RATIOS[name]
    measured, wanted = figures[figure], figures[name]
    of = f", {figures['of']}" if "of" in figures else ""
    is_met = measured <= wanted if side == "≤" else measured >= wanted
    return Target(result, f"{says}{of}", f"{measured:.2f}×", f"{side} {wanted:g}×", is_met)


def _longest(result: str, figures: dict[str, Any], name: str) -> Target:
    spread, figure, says = LONGEST[name]
    measured, wanted = figures[spread][figure], figures[name]
    return Target(result, says, f"{measured:,.{1 if wanted >= 1 else 2}f} ms", f"≤ {wanted:,g} ms", measured <= wanted)
