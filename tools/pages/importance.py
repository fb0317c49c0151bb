"""What the page of important tokens says beyond its results, which IMPRESS's and HyperInfer's pages also cite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tools.pages.rows import Row, column, mean, where

WORKLOADS = ("documents", "few_shot")
RATIO = 0.25
"""Share of a prefix's tokens at which ways are compared."""


def cells(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the figures of every model and workload."""
    return [
        {"model": model, "workload": workload, **figures[workload]}
        for model, figures in results.items()
        for workload in WORKLOADS
    ]


def likeness(found: Iterable[Row], ratio: float) -> list[float]:
    """Average the similarity of heads over the layers of each cell, by the paper's metric."""
    return [mean(column(where(cell["similarity"], metric="h2o", ratio=ratio), "heads")) for cell in found]


def at(found: Iterable[Row], **wanted: Any) -> list[Row]:
    """List what was loaded in each cell at ``RATIO``, by the paper's rule."""
    return [row for cell in found for row in where(cell["loading"], ratio=RATIO, rule="paper", **wanted)]


def best_exact(found: Iterable[Row]) -> list[float]:
    """Find the share of right answers by the best metric of each cell."""
    return [max(column(at([cell]), "exact")) for cell in found]
