"""What IMPRESS's page and HyperInfer's say beyond ratios of their results: IMPRESS, FAST '25."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from thermocline.simulate.profiles import load_model
from tools.pages.papers import Entry
from tools.pages.ratios import Direction, judged, over

STEPS = ("h2o_lfu", "identification", "reordering", "score")
"""The leading system and what each technique adds to it; the last is IMPRESS."""

_SHIFTED_FROM = 15
"""IMPRESS's Figure 15 is HyperInfer's Figure 16, and so on; those before 12 have the same numbers."""

_SECTIONS = {"6.2": "VI-B", "6.5": "VI-E"}
"""Of IMPRESS, and what HyperInfer calls them."""


def steps(rows: Iterable[Mapping[str, Any]], figure: str) -> dict[str, list[float]]:
    """Find what each technique adds: a figure of the step before over its own."""
    found = list(rows)
    return {step: over(found, before, step, figure) for before, step in pairwise(STEPS)}


def thresholds(counted: Mapping[str, Any], metric: str) -> dict[str, dict[float, Mapping[str, Any]]]:
    """Find a metric's rows by model and alpha, in order of alpha."""
    return {
        model: {row["alpha"]: row for row in sorted(part["thresholds"], key=_alpha) if row["metric"] == metric}
        for model, part in counted.items()
    }


def _alpha(row: Mapping[str, Any]) -> float:
    return float(row["alpha"])


def points_lost(by_model: Mapping[str, Mapping[float, Mapping[str, Any]]]) -> list[float]:
    """Find what each model loses in answers between the least and the largest alpha, in points."""
    return [100 * (alphas[min(alphas)]["exact"] - alphas[max(alphas)]["exact"]) for alphas in by_model.values()]


def varies(by_model: Mapping[str, Mapping[float, Mapping[str, Any]]], alpha: float) -> Direction:
    """Say whether what is read differs from layer to layer, in all, some or none of the models."""
    layers = [alphas[alpha]["layers"] for alphas in by_model.values()]
    return judged([1 + max(each) - min(each) for each in layers])


def prefix_gb(model: str, tokens: int) -> float:
    """Find the size of a prefix's KV in gigabytes."""
    return tokens * load_model(model).kv_token_bytes / 1e9


def in_hyperinfer(entry: Entry) -> Entry:
    """Give an entry of IMPRESS the place that it has in HyperInfer, whose evaluation repeats IMPRESS's."""
    name, _, rest = entry.figure.partition(" ")
    if name == "Figure":
        number, _, panel = rest.partition(" ")
        figure = f"Figure {int(number) + (int(number) >= _SHIFTED_FROM)} {panel}".rstrip()
    else:
        figure = _SECTIONS[name]
    where = f"impress.md{entry.where}" if entry.where.startswith("#") else entry.where
    return replace(entry, figure=figure, where=where, what=entry.what.replace("IMPRESS's", "HyperInfer's"))
