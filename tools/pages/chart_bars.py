"""The bars of the charts: groups of named bars with their intervals, from results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.pages.bar_chart import Bar
from tools.pages.formats import number
from tools.pages.peers import pair_title
from tools.pages.rows import Row, by, where

Groups = dict[str, dict[str, Bar]]

_WAYS = {
    "recompute": "recomputed",
    "kv": "KV",
    "hidden": "hidden states",
    "half": "half recomputed, half KV",
    "planned": "planned",
}


def ttft_by_tier(by_tier: Mapping[str, Row]) -> Groups:
    """Give each tier its TTFT in ms, fastest first, with quartiles; tiers that did not serve are left out."""
    served = {row.get("where", tier): row for tier, row in by_tier.items() if "ttft_ms" in row}
    ranked = sorted(served.items(), key=lambda item: float(item[1]["ttft_ms"]))
    return {"": {name: _milliseconds(row["ttft_ms"], *row["quartiles_ms"]) for name, row in ranked}}


def ways_to_restore(figures: Sequence[Row], tokens: int) -> Groups:
    """Give each way its TTFT in ms for a history of so many tokens, by heads and speed of the disk."""
    groups: Groups = {}
    heads = {"mha": "multi-head", "gqa": "grouped queries"}
    for model, title in heads.items():
        for mb_per_s in sorted({row["mb_per_s"] for row in where(figures, model=model)}):
            found = by(where(figures, model=model, mb_per_s=mb_per_s, tokens=tokens), "method")
            groups[f"{title}, disk of {mb_per_s:g} MB/s"] = {
                way: _milliseconds(found[name]["ttft_ms"], *found[name].get("spread_ms", ()))
                for name, way in _WAYS.items()
                if name in found
            }
    return groups


def peer_ratios(runs: Mapping[str, Mapping[str, Row]], figures: Mapping[str, str]) -> Groups:
    """Give each workload's passes their ratios of ours to a peer's, with the least and the most.

    ``runs`` are the runs of each workload, ``figures`` the titles of what is compared.
    """
    groups: Groups = {}
    for workload, found in runs.items():
        for run in found.values():
            results: Mapping[str, Any] = run["results"]
            for pair, passes in results["ratios"].items():
                group = groups.setdefault(f"{workload}: {pair_title(results, pair)}", {})
                for passed, ratios in passes.items():
                    group |= {
                        f"{passed.replace('_', ' ')}, {title}": _times(ratios[name], title)
                        for name, title in figures.items()
                        if name in ratios
                    }
    return {title: group for title, group in groups.items() if group}


def pauses(found: Mapping[str, Row]) -> Groups:
    """Give each event the median pause of a stream in ms, up to its p99 as the interval's end."""
    labels = {title: f"{number(row['p50'])} ms, p99 {number(row['p99'])} ms" for title, row in found.items()}
    return {"": {title: Bar(row["p50"], labels[title], row["p50"], row["p99"]) for title, row in found.items()}}


def _milliseconds(value: float, low: float | None = None, high: float | None = None) -> Bar:
    return Bar(value, f"{number(value)} ms", low, high)


def _times(ratio: Mapping[str, float], figure: str) -> Bar:
    return Bar(ratio["median"], f"{ratio['median']:.2f}×", ratio["least"], ratio["most"], kind=figure)
