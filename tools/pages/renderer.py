"""Render pages from the templates in ``docs/templates`` and committed results.

A template ``docs/templates/results/core.md.j2`` makes ``docs/results/core.md``. Prose stands in templates, figures come
from ``bench/results/*.json``; what takes more than a loop to work out is a function of this package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from thermocline.charts.line_chart import line_chart
from tools import metric_docs
from tools.pages import (
    chart_bars,
    chart_lines,
    code_facts,
    formats,
    hcache,
    hotprefix,
    importance,
    impress,
    mechanisms,
    papers,
    peers,
    policy_standings,
    ratios,
    rows,
    strata,
    targets,
)
from tools.pages.bar_chart import bar_chart

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEMPLATES = DOCS / "templates"
RESULTS = ROOT / "bench" / "results"
"""Where benchmarks leave their figures."""

FOLDERS = ("reference", "results")
"""Those of ``docs`` whose pages have templates; other templates are parts of pages."""

PAGES = tuple(
    template.relative_to(TEMPLATES).as_posix().removesuffix(".j2")
    for folder in FOLDERS
    for template in sorted((TEMPLATES / folder).glob("*.j2"))
)
"""Every page with a template, relative to ``docs``."""

_FORMATS = (
    *(formats.fixed, formats.number, formats.percent, formats.signed, formats.times),
    *(formats.interval, formats.to, formats.spread),
)
_TABLES = (formats.cell, formats.row, formats.head, formats.origin)
_ROWS = (rows.where, rows.column, rows.mean, rows.by)
_FUNCTIONS = (
    *(formats.spread, bar_chart, line_chart, rows.places, rows.aligned, rows.nested),
    *(ratios.ratio, ratios.over, ratios.judged, ratios.counted, papers.Entry, papers.Paper),
)
_MODULES = (
    *(chart_bars, chart_lines, code_facts, metric_docs, mechanisms, peers, policy_standings),
    *(hcache, hotprefix, importance, impress, strata),
)


def headings(folder: str) -> dict[str, str]:
    """Read the first line of every page of a folder, of its template where it has one."""
    found = {}
    for page in sorted((DOCS / folder).glob("*.md")):
        template = TEMPLATES / folder / f"{page.name}.j2"
        source = template if template.exists() else page
        found[page.name] = source.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
    return found


def environment(results: Path = RESULTS) -> Environment:
    """Make what renders templates; a name that is not known, in a template or a result, is an error."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Pages are Markdown, whose readers escape what has to be.
        autoescape=False,
    )

    def result(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    def results_like(pattern: str) -> list[Any]:
        return [result(file.stem) for file in sorted(results.glob(f"{pattern}.json"))]

    made.filters.update({filter_.__name__: filter_ for filter_ in (*_FORMATS, *_TABLES, *_ROWS, impress.in_hyperinfer)})
    made.globals.update({function.__name__: function for function in _FUNCTIONS})
    made.globals.update({module.__name__.rpartition(".")[2]: module for module in _MODULES})
    made.globals.update(result=result, results_like=results_like, targets=lambda: targets.read(results))
    made.globals.update(headings=headings, papers=papers.NAMES)
    return made


def render(page: str, results: Path = RESULTS) -> str:
    """Make a page of ``PAGES`` from the results in a folder."""
    return environment(results).get_template(f"{page}.j2").render().rstrip() + "\n"
