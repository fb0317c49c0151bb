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
    """List what was loaded in each cell at ``RATIO``, by the paper's rule with KV heads as probe heads."""
    return [
        row for cell in found for row in where(cell["loading"], ratio=RATIO, unit="kv_head", rule="paper", **wanted)
    ]


def best_exact(found: Iterable[Row]) -> list[float]:
    """Find the share of right answers by the best metric of each cell."""
    return [max(column(at([cell]), "exact")) for cell in found]


def same_keys(found: Iterable[Row]) -> list[dict[str, Any]]:
    """Compare KV heads with as many query heads as read the same keys: the attention that either vote gets."""
    probes = [{(row["metric"], row["unit"], row["count"]): row for row in cell["probes"]} for cell in found]
    compared = []
    for kv_heads, query_heads in ((2, 3), (1, 2)):
        pairs = [
            (rows[metric, "kv_head", kv_heads], rows[metric, "query_head", query_heads])
            for rows in probes
            for metric in ("h2o", "last_pooled")
        ]
        compared.append(
            {
                "kv_heads": kv_heads,
                "query_heads": query_heads,
                "by_kv_heads": mean(kv["mass"] for kv, _ in pairs),
                "by_query_heads": mean(query["mass"] for _, query in pairs),
                "wins": sum(kv["mass"] >= query["mass"] for kv, query in pairs),
                "cells": len(pairs),
                "alike": mean(query["similarity"] for _, query in pairs),
            }
        )
    return compared
