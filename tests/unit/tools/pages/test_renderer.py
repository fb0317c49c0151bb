"""Templates make every page of results, and read every result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from tools.pages.renderer import DOCS, PAGES, RESULTS, ROOT, environment, headings


def test_every_page_of_results_has_a_template() -> None:
    """But for the log of what did not work, which is written by hand."""
    committed = {f"results/{page.name}" for page in (DOCS / "results").iterdir()}

    assert committed - set(PAGES) == {"results/what-did-not-work.md"}


def test_every_committed_result_is_read_by_a_page_or_named_by_a_document() -> None:
    """What nobody reads is deleted."""
    made = environment()
    read: set[str] = set()
    result: Any
    results_like: Any
    result, results_like = made.globals["result"], made.globals["results_like"]

    def noted(name: str) -> Any:
        read.add(name)
        return result(name)

    def noted_like(pattern: str) -> Any:
        read.update(file.stem for file in RESULTS.glob(f"{pattern}.json"))
        return results_like(pattern)

    made.globals.update(result=noted, results_like=noted_like)
    for page in PAGES:
        made.get_template(f"{page}.j2").render()
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")]
    text = "".join(document.read_text(encoding="utf-8") for document in documents)

    committed = {file.stem for file in RESULTS.glob("*.json")}
    assert {name for name in committed - read if f"bench/results/{name}.json" not in text} == set()


def test_a_name_that_nothing_has_is_an_error() -> None:
    """In a result as in a template; a page with a gap would look whole."""
    with pytest.raises(UndefinedError):
        environment().from_string("{{ result('chaos').results.nothing }}").render()
    with pytest.raises(FileNotFoundError):
        environment().from_string("{{ result('nothing') }}").render()


def test_a_heading_is_the_first_line_of_a_template_or_of_a_page() -> None:
    """So a page's new name is in the index at once."""
    found = headings("results")

    assert found["speed.md"] == "Speed"
    assert found["what-did-not-work.md"] == "What did not work"
    assert set(found) == {page.name for page in Path(DOCS / "results").glob("*.md")}
