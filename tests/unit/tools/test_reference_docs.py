"""Reference pages are what the code says today."""

import pytest

from tools import headlines
from tools.reference_docs import DOCS, PAGES, SETTINGS


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_current(name: str) -> None:
    """After a change, ``python -m tools.reference_docs`` must be run and its pages committed."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name]()


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    """Nobody writes them by hand."""
    text = headlines.README.read_text(encoding="utf-8")

    assert headlines.readme(text) == text
    with pytest.raises(ValueError, match="one place"):
        headlines.readme(text.replace(headlines.END, ""))


def test_every_setting_of_every_command_is_explained() -> None:
    """No row of the settings page lacks a meaning."""
    rows = [line for line in PAGES["reference/settings.md"]().splitlines() if line.startswith("| `--")]
    unexplained = [row for row in rows if row.rstrip(" |").count("|") < 4]

    assert len(rows) == sum(len(kind.__struct_fields__) for _, _, kind in SETTINGS)
    assert unexplained == []
