"""The pages about the papers, for ``python -m tools.reference_docs``: one each, and the index of all results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.papers import pages

PAGES: dict[str, Callable[[], str]] = {
    "results/index.md": pages.index,
    **{f"results/{made.paper.page}": partial(pages.page, made) for made in pages.PAPERS},
}
