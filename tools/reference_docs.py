"""Write the pages that follow from code and results, from their templates in ``docs/templates``.

``python -m tools.reference_docs`` writes them; a test checks that what is committed is what this makes.
"""

from __future__ import annotations

import argparse

from tools.pages.renderer import DOCS, PAGES, ROOT, render

README = ROOT / "README.md"
BEGIN, END = "<!-- begin: headlines, made by `python -m tools.reference_docs` -->\n", "<!-- end: headlines -->\n"


BLOCKS = {
    DOCS / "how-to/upgrade.md": ("release-formats", "renamed-settings"),
}
"""Parts of pages that are made, by page; each has a template in ``docs/templates/parts``."""


def with_blocks(text: str, names: tuple[str, ...]) -> str:
    """Return a page with its made parts as they are today. Raises ValueError where the markers are not there once."""
    for name in names:
        begin = f"<!-- begin: {name}, made by `python -m tools.reference_docs` -->\n"
        end = f"<!-- end: {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the page must have one place for {name}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{render(f'parts/{name}.md')}\n{end}{rest.split(end)[1]}"
    return text


def readme(text: str) -> str:
    """Put the figures of the results into the README. Raises ValueError where the markers are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("the README must have one place for its figures")
    before, rest = text.split(BEGIN)
    return before + BEGIN + render("parts/readme.md") + END + rest.split(END)[1]


def main() -> None:
    """Write every page, and the figures in the README."""
    # There are no flags, but --help must not write.
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page in PAGES:
        (DOCS / page).write_text(render(page), encoding="utf-8")
    for path, names in BLOCKS.items():
        path.write_text(with_blocks(path.read_text("utf-8"), names), encoding="utf-8")
    README.write_text(readme(README.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
