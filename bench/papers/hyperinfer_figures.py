"""What became of each figure of HyperInfer: those of IMPRESS under other numbers, and what it adds.

HyperInfer is IMPRESS with prefetching. All but one of its figures and all numbers of its evaluation are IMPRESS's, but
for a p99 of 2.9 instead of 2.95 s; so is what became of them here.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from bench.papers import impress_figures
from bench.papers.claims import percent, ratio, times
from bench.papers.figures import Documents, Entry, Paper, judged, spread

PAPER = Paper(
    name="HyperInfer",
    page="hyperinfer.md",
    title="HyperInfer's figures: IMPRESS's, and reading ahead",
    figures=26,
    tables=0,
    drawings={
        "Figure 1": "model",
        "Figure 2": "cases",
        "Figure 6": "overview",
        "Figure 9": "a layer's steps",
        "Figure 10": "time lines",
        "Figure 13": "reordering",
        "Figure 14": "metadata",
        "Figure 15": "replacement",
    },
    results=impress_figures.PAPER.results,
)

_SHIFTED_FROM = 15
"""IMPRESS's Figure 15 is HyperInfer's Figure 16, and so on; those before 12 have the same numbers."""

WORKLOADS = ("documents", "few_shot")

_SECTIONS = {"6.2": "VI-B", "6.5": "VI-E"}
_SIMULATED_GUESSES = "#simulated-what-a-guess-is-worth"
_GUESSES = "importance.md#reading-ahead-for-the-next-layer"

Part = dict[str, Any]


def entries(documents: Documents) -> list[Entry]:
    """Every figure and stated number; what it shares with IMPRESS links to that paper's page."""
    shared = [_renumbered(entry) for entry in impress_figures.entries(documents)]
    similar = documents["importance_similarity"]["results"]
    at = next(index for index, entry in enumerate(shared) if entry.figure.startswith("Figure 16"))
    new = [_random(similar), _adjacent(similar)]
    gains = [_simulated(documents["papers_impress"]["results"]["speculation"]), _served(documents), _alone()]
    return [*shared[:at], *new, *shared[at:], *gains]


def _renumbered(entry: Entry) -> Entry:
    name, _, rest = entry.figure.partition(" ")
    if name == "Figure":
        number, _, panel = rest.partition(" ")
        moved = int(number) + (int(number) >= _SHIFTED_FROM)
        figure = f"Figure {moved} {panel}".rstrip()
    else:
        figure = _SECTIONS[name]
    where = f"{impress_figures.PAPER.page}{entry.where}" if entry.where.startswith("#") else entry.where
    return replace(entry, figure=figure, where=where, what=entry.what.replace("IMPRESS's", "HyperInfer's"))


def _cells(similar: dict[str, Part]) -> list[Part]:
    return [part[workload] for part in similar.values() for workload in WORKLOADS]


def loaded(cell: Part, metric: str) -> list[Part]:
    """What a model guessed and loaded of a workload's prefixes, by the paper's threshold, at every ratio."""
    wanted = (metric, "kv_head", "paper")
    return [row for row in cell["loading"] if (row["metric"], row["unit"], row["rule"]) == wanted]


def _random(similar: dict[str, Part]) -> Entry:
    rows = [row for cell in _cells(similar) for row in loaded(cell, "h2o")]
    chance = [row["random_recall"] for row in rows]
    lift = [ratio(row["token_recall"], row["random_recall"]) for row in rows]
    return Entry(
        figure="III",
        what="recall of prefetching at random, and how many times better the layer before guesses",
        paper="no number: the manuscript has placeholders",
        marking="measured",
        here=f"{percent(min(chance))} to {percent(max(chance))}; {spread(lift)}",
        direction=judged(lift),
        command=impress_figures.SIMILARITY,
        where=_GUESSES,
    )


def _adjacent(similar: dict[str, Part]) -> Entry:
    rows = [row for part in _cells(similar) for row in part["similarity"] if row["metric"] == "h2o"]
    adjacent = [row for row in rows if "adjacent" in row]
    quarter = [row["adjacent"] for row in adjacent if row["ratio"] == 0.25]
    over_chance = [ratio(row["adjacent"], row["chance"]) for row in adjacent]
    return Entry(
        figure="Figure 12",
        what="similarity of adjacent layers at 25%, and over chance at 5 to 50%",
        paper="strong; no number in the text",
        marking="measured",
        here=f"{min(quarter):.2f} to {max(quarter):.2f}; {spread(over_chance)}",
        direction=judged(over_chance),
        command=impress_figures.SIMILARITY,
        where="importance.md#similarity-across-adjacent-layers",
        why=""
        if judged(over_chance) == "yes"
        else "These models have four layers, which do different things: into "
        "one of them what mattered before says nothing. On average neighbours are more alike than chance has it "
        f"({times(statistics.mean(over_chance))}).",
    )


def _simulated(rows: list[Part]) -> Entry:
    """TTFT without guessing over that with it, by how much of a guess is right."""
    gains = {
        name: [ratio(row["ttft_ms"]["score"], row["ttft_ms"][name]) for row in rows]
        for name in rows[0]["ttft_ms"]
        if name != "score"
    }
    best, worst = max(gains, key=float), min(gains, key=float)
    half = [name for name in gains if max(gains[name]) > 1.005]
    return Entry(
        figure="IV-C",
        what="reading ahead for the next layer: TTFT without over TTFT with",
        paper="less TTFT; no figure shows it alone",
        marking="simulated",
        here=f"{spread(gains[worst])} if nothing is guessed right, {spread(gains[best])} if {float(best):.0%} is",
        direction="partly" if half else "no",
        command=impress_figures.SIMULATED,
        where=_SIMULATED_GUESSES,
        why="A guess is read while a layer computes; but a layer computes for a fraction of the time that its reads "
        "take, so that little can be hidden, while whatever is guessed wrong keeps the disk from what is wanted.",
    )


def _served(documents: Documents) -> Entry:
    by_rate: dict[float, dict[str, Part]] = {}
    for figure in documents["importance_serving"]["results"]["figures"]:
        by_rate.setdefault(figure["mb_per_s"], {})[figure["system"]] = figure
    pairs = [found for found in by_rate.values() if {"score", "on_demand"} <= set(found)]
    gains = [ratio(found["on_demand"]["ttft_mean_ms"], found["score"]["ttft_mean_ms"]) for found in pairs]
    return Entry(
        figure="IV-C",
        what="the same in whole cells on a CPU, where a controller decides when to read ahead",
        paper="less TTFT; no figure shows it alone",
        marking="measured",
        here=spread(gains),
        direction=judged(gains),
        command=impress_figures.SERVING,
        where="importance-serving.md",
        why="The controller seldom allows it, because adjacent layers are hardly alike here: it protects from the loss "
        "that the simulation shows, and there is nothing to gain.",
    )


def _alone() -> Entry:
    return Entry(
        figure="Abstract",
        what="TTFT over the state of the art, of the whole system",
        paper="up to 2×; up to 2.8× in the introduction and VI-B",
        marking="not run",
        where="impress.md#figures-16-17-21-and-25-ttft-loading-hits",
        why="The paper's two numbers differ, and its evaluation has IMPRESS's. What it compares with is in Figure 17.",
    )
