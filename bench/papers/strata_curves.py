"""Curves of throughput against TTFT, and what is read off them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bench.papers.claims import ratio
from bench.papers.simulated import Row

COMPARED_TTFT_MS = (500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0)
"""At which "throughput at the same TTFT" is looked for; the paper says up to, and not where."""


SMALL_PAGES = "+ IO, 32"
"""GPU-assisted copies, with which others are compared in Figure 10."""


def peak(rows: Sequence[Row]) -> float:
    """The largest throughput over all rates, in output tokens a second."""
    return max(float(row["output_tokens_per_s"]) for row in rows)


def throughput_at(rows: Sequence[Row], ttft_ms: float) -> float | None:
    """Where the curve first crosses this mean TTFT, between two rates; None where it starts above it.

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
    """The largest ratio of throughputs at one TTFT, and that TTFT in ms; None where no TTFT is on both curves."""
    found = []
    for ttft_ms in COMPARED_TTFT_MS:
        ours, theirs = throughput_at(rows, ttft_ms), throughput_at(base, ttft_ms)
        if ours is not None and theirs is not None:
            found.append((ratio(ours, theirs), ttft_ms))
    return max(found) if found else None


def stall_share(row: Row) -> float:
    """Of a worker's time in steps, what it waited for loads."""
    return float(row["stall_s"] / (row["stall_s"] + row["compute_s"]))


def by_page_size(large: dict[str, Row], curves: dict[str, list[Row]]) -> dict[str, Row]:
    """Figure 10's bars: HiCache by page size, and GPU-assisted copies of small pages, each at its peak."""

    def best(rows: Sequence[Row]) -> Row:
        return max(rows, key=lambda row: float(row["output_tokens_per_s"]))

    hicache = {"32": best(curves["HiCache"])} | large
    return {f"HiCache, {size}": row for size, row in hicache.items()} | {SMALL_PAGES: best(curves["+ IO"])}
