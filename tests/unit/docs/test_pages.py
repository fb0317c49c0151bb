"""What pages name exists: metrics and files of code; and a table has all of its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.unit.infra.deployed_code import metric_names
from tests.unit.tools.promql import series_of
from tools.metric_docs import PROCESSES, exported_by

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md"), ROOT / "models/README.md"]
)
GUIDES = [page for page in PAGES if page.parent.name in {"docs", "how-to", "concepts"}]
CODE = [
    f"/{path.relative_to(ROOT)}"
    for name in ("services", "shared", "thermocline", "tools", "bench", "tests", "examples")
    for path in (ROOT / name).rglob("*.py")
]
FILE = re.compile(r"`([\w/]+\.py)`(?! at commit)")
OF_THE_TEMPLATE = {"most_shared/__init__.py", "tests/test_most_shared.py"}
"""Files of the project that ``your-own-policy.md`` makes."""


def name_of(page: Path) -> str:
    """A page as its reader finds it."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_row_stands_outside_its_table(page: Path) -> None:
    """A blank line ends a table, and what follows it is shown with its bars."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))

    assert [
        token.content
        for token in tokens
        if token.type == "inline" and re.search(r"^\|.*\|$", token.content, re.MULTILINE)
    ] == []


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_metrics_of_a_page_exist(page: Path) -> None:
    """Each is a series that a process exports, or the name that several series have in common."""
    exported = {name: facts for process in PROCESSES for name, facts in exported_by(process).items()}
    known = set(exported) | set(series_of(exported)) | {facts.series for facts in exported.values()}
    text = page.read_text(encoding="utf-8").partition("\n## Names that changed\n")[0]

    assert metric_names(text) - known == set()


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_files_of_code_that_a_page_names_are_there(page: Path) -> None:
    """By a path from the root, or the end of one. One that is gone is named with the commit that has it."""
    named = set(FILE.findall(page.read_text(encoding="utf-8"))) - OF_THE_TEMPLATE

    assert {name for name in named if not any(file.endswith(f"/{name}") for file in CODE)} == set()
