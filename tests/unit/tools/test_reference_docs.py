"""Pages are what their templates, the code and the results say today."""

from pathlib import Path

import pytest

from services.scheduler.core.fold.snapshot import EARLIER_VERSION
from shared.renamed_settings import REMOVED, RENAMED
from shared.versions import STATE
from thermocline.settings import SECTIONS
from tools.pages.code_facts import settings
from tools.pages.renderer import DOCS, PAGES, render
from tools.reference_docs import BLOCKS, END, README, readme, with_blocks


@pytest.mark.parametrize("page", PAGES)
def test_committed_pages_are_current(page: str) -> None:
    """After a change, ``python -m tools.reference_docs`` must be run and its pages committed."""
    assert (DOCS / page).read_text(encoding="utf-8") == render(page)


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    """Nobody writes them by hand."""
    text = README.read_text(encoding="utf-8")

    assert readme(text) == text
    with pytest.raises(ValueError, match="one place"):
        readme(text.replace(END, ""))


@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.name)
def test_made_parts_of_pages_are_current(page: Path) -> None:
    """Versions of formats, and tables of renamed and removed settings: ``python -m tools.reference_docs``."""
    text = page.read_text(encoding="utf-8")

    assert with_blocks(text, BLOCKS[page]) == text
    with pytest.raises(ValueError, match="one place"):
        with_blocks("", BLOCKS[page])


def test_the_versions_on_the_page_are_those_of_the_code() -> None:
    """Every release that left bytes has a column; renamed and removed settings are all there."""
    formats, renamed = render("parts/release-formats.md"), render("parts/renamed-settings.md")

    assert f"| `state` | 8.0 | 12.1 | {STATE.version} |" in formats
    assert f"also reads `state` {EARLIER_VERSION}." in formats
    assert all(f"`{old}`" in renamed for old in (*RENAMED, *REMOVED))


@pytest.mark.parametrize("command", SECTIONS)
def test_every_setting_of_every_command_is_explained(command: str) -> None:
    """No row of the settings page lacks a meaning."""
    unexplained = [flag for flag, _, _, meaning in settings(command) if not meaning]

    assert unexplained == []
