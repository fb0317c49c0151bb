"""The papers, their pages under ``docs/results/`` and the index of them all, from committed results alone.

``python -m tools.reference_docs`` writes the pages; a test checks that what is committed is what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import results_file
from bench.papers import (
    hcache_figures,
    hcache_page,
    hotprefix_figures,
    hotprefix_page,
    hyperinfer_figures,
    hyperinfer_page,
    impress_figures,
    impress_page,
    strata_figures,
    strata_page,
)
from bench.papers.claims import table
from bench.papers.figures import Documents, Entry, Paper

INDEX = "index.md"
DOCS = Path(__file__).parents[2] / "docs" / "results"


_HEAD = """\
# Results, and what became of the papers' figures

Made by `python -m tools.reference_docs` from `bench/results/`. Each paper has a page that lists every figure and table
of it, ours beside theirs, with the command that makes it; the last table of this page has them all.
"""

_HOW_MANY = """\
## How many figures of the papers

*Measured* is on a CPU machine with two cores and the bundled models. *Simulated* is the paper's hardware as a profile:
the scheduler's own core under virtual time ([how](simulator.md)), the planner's cost model, or a model of the disk's
path. No figure of a GPU was measured, so whatever is about one is *not run*, or simulated. *Direction* compares what
the paper says is better with what is better here, in all compared cases, in part of them, or in none; "-" is where
nothing was run, or nothing is claimed.
"""


@dataclass(frozen=True, slots=True)
class Made:
    """How a paper's entries and page follow from documents."""

    paper: Paper
    entries: Callable[[Documents], list[Entry]]
    render: Callable[[Documents], str]


PAPERS = (
    Made(hotprefix_figures.PAPER, hotprefix_figures.entries, hotprefix_page.render),
    Made(strata_figures.PAPER, strata_figures.entries, strata_page.render),
    Made(hcache_figures.PAPER, hcache_figures.entries, hcache_page.render),
    Made(impress_figures.PAPER, impress_figures.entries, impress_page.render),
    Made(hyperinfer_figures.PAPER, hyperinfer_figures.entries, hyperinfer_page.render),
)


def documents_of(paper: Paper) -> Documents:
    """Raises FileNotFoundError where a results file is missing."""
    return {
        name: json.loads((results_file.RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in paper.results
    }


def page(made: Made) -> str:
    """A paper's page."""
    return made.render(documents_of(made.paper))


def index() -> str:
    """One table of all papers' figures, linked to where they are told of."""
    found = [(made.paper, made.entries(documents_of(made.paper))) for made in PAPERS]
    rows = [
        [paper.name, f"[{entry.figure}]({_link(paper, entry)})", entry.what, entry.marking, entry.direction]
        for paper, entries in found
        for entry in entries
    ]
    counted = ["paper", "listed", "measured", "simulated", "not run", "direction is the paper's", "in part", "not"]
    lines = [
        _HEAD,
        *table(["of Thermocline itself"], _own()),
        "",
        _HOW_MANY,
        *table(counted, [_counts(paper, entries) for paper, entries in found]),
        "",
        "## Every figure",
        "",
        *table(["paper", "figure", "what", "marking", "direction reproduced"], rows),
    ]
    return "\n".join(lines) + "\n"


def _own() -> list[list[object]]:
    """The other pages of results, by their headings."""
    of_papers = {made.paper.page for made in PAPERS} | {INDEX}
    found = sorted(path for path in DOCS.glob("*.md") if path.name not in of_papers)
    return [[f"[{_heading(path)}]({path.name})"] for path in found]


def _heading(path: Path) -> str:
    """The first line of a page, without its mark."""
    with path.open(encoding="utf-8") as page_file:
        return page_file.readline().removeprefix("#").strip()


def _counts(paper: Paper, entries: list[Entry]) -> list[object]:
    markings = [sum(entry.marking == marking for entry in entries) for marking in ("measured", "simulated", "not run")]
    directions = [sum(entry.direction == direction for entry in entries) for direction in ("yes", "partly", "no")]
    return [f"[{paper.name}]({paper.page})", len(entries), *markings, *directions]


def _link(paper: Paper, entry: Entry) -> str:
    """Where it is told of: a heading of the paper's page, or another page."""
    return entry.where if entry.where and not entry.where.startswith("#") else f"{paper.page}{entry.where}"
