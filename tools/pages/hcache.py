"""What HCache's page says beyond ratios of its results: HCache, EuroSys '25."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.pages.rows import aligned

_PEAK_FLOPS = 312e12
"""Of an A100."""


def by_rate(conversations: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """Put the methods of each model and rate together (Figure 9): a row with ``model``, and one for each method."""
    return [{"model": model, **found} for model, methods in conversations.items() for found in aligned(methods)]


def beside(rows: Iterable[Mapping[str, Any]], name: str, by_model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Put what is known of a row's model beside its figures."""
    return [{**row, name: by_model[row["model"]]} for row in rows]


def partition(split: Mapping[str, int]) -> str:
    """Write a partition in the paper's words: H hidden states, KV, RE recomputation."""
    named = (("RE", split["tokens"]), ("H", split["hidden"]), ("KV", split["kv"]))
    return " + ".join(f"{layers} {name}" for name, layers in named if layers)


def implied_share(hidden: int, devices: int, gb_s: float) -> float:
    """Find the part of an A100's peak that a balanced bandwidth implies for the projection (6.1.3)."""
    seconds = 2 * hidden / (gb_s * 1e9)
    return 4 * hidden * hidden / devices / seconds / _PEAK_FLOPS


def disk_gb_s_for(row: Mapping[str, Any], gb_s: float, hidden: int, others: int) -> float:
    """Find the speed of disks at which the paper's formula has so many layers from hidden states, others from tokens.

    ``row`` is a line of Table 3 whose times are those of disks of ``gb_s`` a device, and scale with them.
    """
    us = row["times_us"]
    return float(gb_s * us["io_hidden"] / (us["compute_hidden"] + us["compute_tokens"] * others / hidden))
