"""What Strata's page reads off curves of throughput against TTFT: Strata, arXiv:2508.18572."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from services.scheduler.config import SchedulerConfig
from tools.pages.ratios import ratio

Row = Mapping[str, Any]

COMPARED_TTFT_MS = (500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0)
"""At which "throughput at the same TTFT" is looked for; the paper says up to, and not where."""

SMALL_PAGES = "+ IO, 32"
"""GPU-assisted copies, with which others are compared in Figure 10."""


def peak(rows: Sequence[Row]) -> float:
    """Find the largest throughput over all rates, in output tokens a second."""
    return max(float(row["output_tokens_per_s"]) for row in rows)


def throughput_at(rows: Sequence[Row], ttft_ms: float) -> float | None:
    """Find where the curve first crosses this mean TTFT, between two rates; None where it starts above it.

    A curve that never gets there counts with its peak.
    """
    if rows[0]["ttft_ms"] > ttft_ms:
        return None
    for left, right in pairwise(rows):
        if right["ttft_ms"] > ttft_ms:
            part = (ttft_ms - left["ttft_ms"]) / (right["ttft_ms"] - left["ttft_ms"])
            return float(
                left["output_tokens_per_s"] + part * (right["output_tokens_per_s"] - left["output_tokens_per_s"])
            )
    return peak(rows)


def best_at_same_ttft(rows: Sequence[Row], base: Sequence[Row]) -> tuple[float, float] | None:
    """Find the largest ratio of throughputs at one TTFT, and that TTFT in ms; None where no TTFT is on both curves."""
    found = []
    for ttft_ms in COMPARED_TTFT_MS:
        ours, theirs = throughput_at(rows, ttft_ms), throughput_at(base, ttft_ms)
        if ours is not None and theirs is not None:
            found.append((ratio(ours, theirs), ttft_ms))
    return max(found) if found else None


def stall_share(row: Row) -> float:
    """Divide what a worker waited for loads by its time in steps."""
    return float(row["stall_s"] / (row["stall_s"] + row["compute_s"]))


def by_page_size(large: Mapping[str, Row], curves: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
    """Find Figure 10's bars: HiCache by page size, and GPU-assisted copies of small pages, each at its peak."""

    def best(rows: Sequence[Row]) -> Row:
        return max(rows, key=lambda row: float(row["output_tokens_per_s"]))

    hicache = {"32": best(curves["HiCache"]), **large}
    return {f"HiCache, {size}": row for size, row in hicache.items()} | {SMALL_PAGES: best(curves["+ IO"])}


def gains(rows: Mapping[str, Row]) -> dict[str, tuple[float, float]]:
    """Find what each step of Figure 11 adds to peak throughput: over the step before, and over the baseline."""
    speeds = {name: float(row["output_tokens_per_s"]) for name, row in rows.items()}
    base = next(iter(speeds.values()))
    return {
        name: (ratio(speeds[name], speeds[before]) - 1, (speeds[name] - speeds[before]) / base)
        for before, name in pairwise(speeds)
    }


IS_PREFILLING = SchedulerConfig().bubble_prefill
"""Whether prefill fills bubbles by default."""


def better(rows: Sequence[Row], base: Sequence[Row], name: str) -> float:
    """Find by what part of ``base`` these runs are better: above it in tokens a second, below it in times."""
    change = ratio(sum(float(row[name]) for row in rows), sum(float(row[name]) for row in base)) - 1
    return change if name.endswith("_per_s") else -change


def counted_in(rows: Sequence[Row], counter: str) -> int:
    """Add up a counter of the core over runs."""
    return sum(int(row["counters"].get(counter, 0)) for row in rows)
