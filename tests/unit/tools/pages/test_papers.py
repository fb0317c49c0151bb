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

from tools.pages.papers import NAMES, Entry, Paper
from tools.pages.renderer import DOCS, environment, render

NUMBERED = re.compile(r"^(Figure|Table) (\d+)")
BY_PAPER = pytest.mark.parametrize("name", NAMES)


@cache
def paper_of(name: str) -> Paper:
    """What its template sets."""
    paper: Paper = environment().get_template(f"papers/{name}.j2").module.paper  # type: ignore[attr-defined]
    return paper


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as a forge and the site make them."""
    tokens = MarkdownIt("commonmark").parse((DOCS / "results" / page).read_text(encoding="utf-8"))
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@BY_PAPER
def test_every_figure_and_table_is_listed_or_is_a_drawing(name: str) -> None:
    """From 1 to the paper's last, each in one of the two places, and nothing beyond it."""
    paper = paper_of(name)
    listed = {match.group() for entry in paper.entries if (match := NUMBERED.match(entry.figure))}
    expected = {f"Figure {number + 1}" for number in range(paper.figures)}
    expected |= {f"Table {number + 1}" for number in range(paper.tables)}

    assert listed | set(paper.drawings) == expected
    assert listed & set(paper.drawings) == set()


@BY_PAPER
def test_what_was_run_has_a_figure_and_a_command_and_what_was_not_a_reason(name: str) -> None:
    """A marking without what belongs to it says nothing."""
    for entry in paper_of(name).entries:
        if entry.marking == "not run":
            assert entry.why, entry.figure
            assert entry.direction == "-", entry.figure
            assert not entry.here, entry.figure
        else:
            assert entry.here, entry.figure
            assert entry.command, entry.figure
        assert entry.paper, entry.figure


@BY_PAPER
def test_a_direction_that_is_not_the_papers_is_explained(name: str) -> None:
    """So is a figure that is an input here."""
    unexplained = [
        f"{entry.figure}, {entry.what}"
        for entry in paper_of(name).entries
        if entry.direction in ("partly", "no") and not entry.why
    ]

    assert unexplained == []


@BY_PAPER
def test_commands_name_modules_and_flags_that_exist(name: str) -> None:
    """Each is ``python -m`` of a module of this repository whose source knows every flag that it is given."""
    for entry in paper_of(name).entries:
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
def test_links_lead_to_headings_that_exist(name: str) -> None:
    """On the paper's own page, or on another one of the site."""
    for entry in paper_of(name).entries:
        if not entry.where:
            continue
        page, _, anchor = entry.where.partition("#")
        page = page or paper_of(name).page

        assert (DOCS / "results" / page).is_file(), entry.where
        assert not anchor or anchor in anchors(page), entry.where


def test_the_index_has_every_entry_and_every_page() -> None:
    """A line for each entry, counts that add up, and a link to each page of results."""
    text = render("results/index.md")

    for name in NAMES:
        paper = paper_of(name)
        counts = Counter(entry.marking for entry in paper.entries)
        assert len(re.findall(rf"^\| {paper.name} \| ", text, re.MULTILINE)) == len(paper.entries)
        shown = f"| {len(paper.entries)} | {counts['measured']} | {counts['simulated']} | {counts['not run']} |"
        assert f"[{paper.name}]({paper.page}) {shown}" in text
    for page in (DOCS / "results").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in text


def test_a_list_says_what_was_not_run_and_which_figures_are_drawings() -> None:
    """Reasons stand below the table, and only of those that need one."""
    ran = Entry(
        figure="Figure 1",
        what="speed",
        paper="2×",
        marking="measured",
        here="2.1×",
        direction="yes",
        command="python x",
        why="It is as fast.",
    )
    missing = replace(ran, marking="not run", here="", direction="-", command="", why="It takes a GPU.")
    drawings = {"Figure 2": "plan"}
    paper = Paper(name="P", page="p.md", figures=2, tables=0, drawings=drawings, entries=[ran, missing])

    text = environment().get_template("parts/papers.j2").module.every_figure(paper)  # type: ignore[attr-defined]

    assert "| Figure 1 | speed | 2× | measured | 2.1× | yes | `python x` |" in text
    assert "| Figure 1 | speed | 2× | not run | - | - | - |" in text
    assert "Drawings without a result: Figure 2 (plan)." in text
    assert re.findall(r"^- .*", text, re.MULTILINE) == ["- **Figure 1, speed** (not run). It takes a GPU."]
