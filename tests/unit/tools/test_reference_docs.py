"""Pages are what their templates, the code and the results say today."""

import pytest

from thermocline.settings import SECTIONS
from tools.pages.code_facts import settings
from tools.pages.renderer import DOCS, PAGES, render
from tools.reference_docs import END, README, readme


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


@pytest.mark.parametrize("command", SECTIONS)
def test_every_setting_of_every_command_is_explained(command: str) -> None:
    """No row of the settings page lacks a meaning."""
    unexplained = [flag for flag, _, _, meaning in settings(command) if not meaning]

    assert unexplained == []
