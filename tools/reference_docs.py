"""Write the pages that follow from code and results, from their templates in ``docs/templates``.

``python -m tools.reference_docs`` writes them; a test checks that what is committed is what this makes.
"""

from __future__ import annotations

from tools.pages.renderer import DOCS, PAGES, ROOT, render

README = ROOT / "README.md"
BEGIN, END = "<!-- begin: headlines, made by `python -m tools.reference_docs` -->\n", "<!-- end: headlines -->\n"


def readme(text: str) -> str:
    """Put the figures of the results into the README. Raises ValueError where the markers are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("the README must have one place for its figures")
    before, rest = text.split(BEGIN)
    return before + BEGIN + render("parts/readme.md") + END + rest.split(END)[1]


def main() -> None:
    """Write every page, and the figures in the README."""
    for page in PAGES:
        (DOCS / page).write_text(render(page), encoding="utf-8")
    README.write_text(readme(README.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
