"""The lines of the charts: what the vertical axis shows by what the horizontal one does, by name of line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.pages.rows import Row, column, mean, where

Lines = dict[str, dict[float, float]]


def similarity(results: Mapping[str, Any]) -> Lines:
    """Average the similarity of heads and of adjacent layers on documents, by the percentage of tokens chosen."""
    lines: Lines = {}
    for model, figures in results.items():
        rows = where(figures["documents"]["similarity"], metric="h2o")
        titles = {f"heads, {model}": "heads", f"adjacent layers, {model}": "adjacent", "by chance": "chance"}
        for title, name in titles.items():
            lines[title] = {
                100 * ratio: mean(column(where(rows, ratio=ratio), name))
                for ratio in sorted(set(column(rows, "ratio")))
            }
    return lines


def accuracy(found: Row) -> Lines:
    """Find each method's percentage of right answers by the percentage of a prefix that is kept."""
    rows, whole = sorted(found["methods"], key=lambda row: float(row["ratio"])), 100 * found["accuracy"]
    lines = {"the whole prefix": {100 * row["ratio"]: whole for row in rows}}
    for method in dict.fromkeys(row["method"] for row in found["methods"]):
        lines[method] = {100 * row["ratio"]: whole - row["drop_points"] for row in where(rows, method=method)}
    return lines


def hit_ratios(by_blocks: Mapping[str, Mapping[str, Row]]) -> Lines:
    """Find each policy's hit ratio by the blocks in the pool; exact counts are no policy that a cell could have."""
    return {
        name: {int(blocks): rows[name]["ratio"] for blocks, rows in by_blocks.items()}
        for name in next(iter(by_blocks.values()))
        if name != "hotprefix, exact"
    }


def bandwidth(by_page_size: Mapping[str, Mapping[str, Row]]) -> Lines:
    """Find each mover's GB/s by the tokens of a page, and those of a plain copy beside the fastest."""
    names = {
        name: name.replace("_verified", ", verified").replace("_", " ") for name in next(iter(by_page_size.values()))
    }
    sizes = sorted(by_page_size, key=int)
    lines = {title: {int(size): by_page_size[size][name]["gb_s"] for size in sizes} for name, title in names.items()}
    return lines | {"memcpy": {int(size): by_page_size[size]["batched"]["memcpy_gb_s"] for size in sizes}}
