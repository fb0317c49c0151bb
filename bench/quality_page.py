"""``docs/results/quality.md`` from the committed results of :mod:`bench.importance_quality`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import results_file
from bench.papers.claims import percent, table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "quality.md"
RESULTS = results_file.RESULTS / "importance_quality.json"

Part = dict[str, Any]

_HEAD = """\
# What loading a part of a prefix costs in answers

How to measure a model of your own, and what the columns mean, is in [the how-to](../how-to/evaluate.md).
"""

_REACH = """\
## What the bundled models can do

Accuracy with the whole prefix. A task on which a model is near guessing cannot show a loss.
"""

_COMPARED = """\
## Methods at equal retention

Percentage points of accuracy lost against the whole prefix, with the standard error of each; negative is gained.
"""

_READ = """\
## What it takes to know

Part of the prefix's KV that was read, to choose and to attend, and behind it the part of the layers in which probe
heads disagreed. These models have few heads, so three probe heads are half of all, or all.
"""


def write() -> None:
    """Raises FileNotFoundError where there are no results."""
    PAGE.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


def render(document: Part) -> str:
    """The whole page."""
    results = document["results"]
    lines = [_HEAD, _made_by(document), "", _REACH, *_reach(results["reach"]), ""]
    for part in results["compared"]:
        lines += [_COMPARED, *_heading(part), *_drops(part), "", _READ, *_reads(part), ""]
    return "\n".join(lines)


def _made_by(document: Part) -> str:
    return (
        f"`{document['command']}`, seed {document['seed']}, commit {document['commit']}, {document['date']}, on "
        f"{document['hardware']['processor']}. Nothing on this page is a time."
    )


def _reach(parts: list[Part]) -> list[str]:
    models = list(dict.fromkeys(part["model"] for part in parts))
    by_task: dict[str, dict[str, Part]] = {}
    for part in parts:
        by_task.setdefault(part["task"], {})[part["model"]] = part
    rows = [
        [
            task,
            f"{next(iter(found.values()))['chance']:.0%}",
            *(f"{found[model]['accuracy']:.1%} ± {found[model]['standard_error_points']:.1f}" for model in models),
        ]
        for task, found in by_task.items()
    ]
    count = parts[0]["questions"]
    return table(["task", "guessing", *(f"{model}, {count} questions" for model in models)], rows)


def _heading(part: Part) -> list[str]:
    return [
        f"{part['model']} on {part['task']}, {part['questions']} questions over {part['prefixes']} prefixes of "
        f"{part['prefix_tokens']} tokens; {percent(part['accuracy'])} right with the whole prefix.",
        "",
    ]


def _drops(part: Part) -> list[str]:
    def cell(one: Part) -> str:
        return f"{one['drop_points']:.1f} ± {one['standard_error_points']:.1f}"

    return _grid(part, cell)


def _reads(part: Part) -> list[str]:
    def cell(one: Part) -> str:
        return f"{one['read']:.0%}" + (f" ({one['fallbacks']:.0%})" if one["fallbacks"] else "")

    return _grid(part, cell)


def _grid(part: Part, cell: Callable[[Part], str]) -> list[str]:
    """A row for each method, a column for each ratio."""
    ratios = list(dict.fromkeys(one["ratio"] for one in part["methods"]))
    rows: dict[str, list[str]] = {}
    for one in part["methods"]:
        rows.setdefault(one["method"], [f"`{one['method']}`"]).append(cell(one))
    return table(["method", *(f"{ratio:.0%} kept" for ratio in ratios)], rows.values())


if __name__ == "__main__":
    write()
