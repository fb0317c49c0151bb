"""Every figure of every paper is listed, marked, and has a command that exists; pages are what their results make."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from bench.papers import pages
from bench.papers.figures import Entry, Paper, every_figure, judged, reasons, spread
from bench.papers.pages import PAPERS, Made

ROOT = Path(__file__).parents[3]
NUMBERED = re.compile(r"^(Figure|Table) (\d+)")
BY_PAPER = pytest.mark.parametrize("made", PAPERS, ids=lambda made: made.paper.name)


@cache
def entries_of(paper: str) -> tuple[Entry, ...]:
    made = next(each for each in PAPERS if each.paper.name == paper)
    return tuple(made.entries(pages.documents_of(made.paper)))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as a forge and the site make them."""
    tokens = MarkdownIt("commonmark").parse((ROOT / "docs" / "results" / page).read_text(encoding="utf-8"))
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@BY_PAPER
def test_every_figure_and_table_is_listed_or_is_a_drawing(made: Made) -> None:
    """From 1 to the paper's last, each in one of the two places, and nothing beyond it."""
    paper = made.paper
    listed = {match.group() for entry in entries_of(paper.name) if (match := NUMBERED.match(entry.figure))}
    expected = {f"Figure {number + 1}" for number in range(paper.figures)}
    expected |= {f"Table {number + 1}" for number in range(paper.tables)}

    assert listed | set(paper.drawings) == expected
    assert listed & set(paper.drawings) == set()


@BY_PAPER
def test_what_was_run_has_a_figure_and_a_command_and_what_was_not_a_reason(made: Made) -> None:
    """A marking without what belongs to it says nothing."""
    for entry in entries_of(made.paper.name):
        if entry.marking == "not run":
            assert entry.why, entry.figure
            assert entry.direction == "-", entry.figure
            assert not entry.here, entry.figure
        else:
            assert entry.here, entry.figure
            assert entry.command, entry.figure
        assert entry.paper, entry.figure


@BY_PAPER
def test_a_direction_that_is_not_the_papers_is_explained(made: Made) -> None:
    """So is a figure that is an input here."""
    unexplained = [
        f"{entry.figure}, {entry.what}"
        for entry in entries_of(made.paper.name)
        if entry.direction in ("partly", "no") and not entry.why
    ]

    assert unexplained == []


@BY_PAPER
def test_commands_name_modules_and_flags_that_exist(made: Made) -> None:
    """Each is ``python -m`` of a module of this repository whose source knows every flag that it is given."""
    for entry in entries_of(made.paper.name):
        if not entry.command:
            continue
        python, dash_m, module, *arguments = shlex.split(entry.command)
        flags = {each for each in arguments if each.startswith("--")}
        where = "thermocline.simulate.__main__" if arguments[:1] == ["simulate"] else module
        spec = importlib.util.find_spec(where)

        assert (python, dash_m) == ("python", "-m")
        assert spec is not None, module
        assert spec.origin is not None, module
        source = Path(spec.origin).read_text(encoding="utf-8")
        assert [flag for flag in flags if f'"{flag}"' not in source] == [], entry.command


@BY_PAPER
def test_links_lead_to_headings_that_exist(made: Made) -> None:
    """On the paper's own page, or on another one of the site."""
    for entry in entries_of(made.paper.name):
        if not entry.where:
            continue
        page, _, anchor = entry.where.partition("#")
        page = page or made.paper.page

        assert (ROOT / "docs" / "results" / page).is_file(), entry.where
        assert not anchor or anchor in anchors(page), entry.where


@BY_PAPER
def test_a_committed_page_is_what_its_results_make(made: Made) -> None:
    """Figures of the pages cannot drift from the results."""
    page = (ROOT / "docs" / "results" / made.paper.page).read_text(encoding="utf-8")

    assert page == pages.page(made)


def test_the_index_has_every_entry_and_every_page() -> None:
    """A line for each entry, counts that add up, and a link to each page of results."""
    text = (ROOT / "docs" / "results" / pages.INDEX).read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if line.rsplit("|", 3)[-3:-2] and line.startswith("| ")]

    assert text == pages.index()
    for made in PAPERS:
        found = entries_of(made.paper.name)
        counts = Counter(entry.marking for entry in found)
        assert sum(line.startswith(f"| {made.paper.name} | ") for line in listed) == len(found)
        shown = f"| {len(found)} | {counts['measured']} | {counts['simulated']} | {counts['not run']} |"
        assert f"[{made.paper.name}]({made.paper.page}) {shown}" in text
    for page in (ROOT / "docs" / "results").glob("*.md"):
        assert page.name == pages.INDEX or f"({page.name})" in text


def test_a_direction_is_the_papers_only_where_every_ratio_is_above_one() -> None:
    """All is yes, some is partly, none is no; without a ratio there is no direction."""
    assert judged([1.2, 1.01]) == "yes"
    assert judged([1.2, 1.0]) == "partly"
    assert judged([1.0, 0.9]) == "no"
    with pytest.raises(ValueError, match="a ratio at least"):
        judged([])


def test_equal_ratios_are_written_once() -> None:
    """A range needs two ends that look different."""
    assert spread([1.201, 1.204]) == "1.20×"
    assert spread([3.4, 1.2]) == "1.20 to 3.40×"


def test_a_list_says_what_was_not_run_and_which_figures_are_drawings() -> None:
    """Reasons stand below the table, and only of those that need one."""
    paper = Paper(name="P", page="p.md", title="P", figures=2, tables=0, drawings={"Figure 2": "plan"}, results=())
    ran = Entry(
        figure="Figure 1",
        what="speed",
        paper="2×",
        marking="measured",
        here="2.1×",
        direction="yes",
        command="python x",
    )
    missing = replace(ran, marking="not run", here="", direction="-", command="", why="It takes a GPU.")

    text = "\n".join(every_figure(paper, [ran, missing]))

    assert "| Figure 1 | speed | 2× | measured | 2.1× | yes | `python x` |" in text
    assert "| Figure 1 | speed | 2× | not run | - | - | - |" in text
    assert "Drawings without a result: Figure 2 (plan)." in text
    assert reasons([ran, missing]) == ["- **Figure 1, speed** (not run). It takes a GPU."]
