"""``docs/results/quality.md`` from the committed results of :mod:`bench.importance_quality`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import results_file
from bench.line_chart import line_chart
from bench.papers.claims import percent, table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "quality.md"
CHART = PAGE.with_suffix(".svg")
RESULTS = results_file.RESULTS / "importance_quality.json"
RECOMMENDED = results_file.RESULTS / "importance_recommended.json"

Part = dict[str, Any]

_READ_AT = 0.1

_HEAD = """\
# What loading a part of a prefix costs in answers

How to measure a model of your own, and what the columns mean, is in [the how-to](../how-to/evaluate.md).
"""

_REACH = """\
## What the bundled models can do

Accuracy with the whole prefix. A task on which a model is near guessing cannot show a loss.
"""

_RECOMMENDED = """\
## The recommended way

`importance:last_pooled`: tokens count by what the last query token gives them and their neighbours. Points of accuracy
lost on documents, and in the last column the part of KV that was read for 10%. IMPRESS reports drops below one point
for OPT-6.7B to OPT-30B on PIQA, RTE, COPA and OpenBookQA, and 0.2 points on average where 25% is kept, on COPA 50%
(its Figure 15 and section 6.2). Three of its models' 32 or more heads are a tenth of them; a tenth of these models'
heads is less than one, so one is asked here beside three.
"""

_CHART = "![Accuracy by part of the prefix that is kept](quality.svg)"

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
    document, recommended = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, RECOMMENDED))
    PAGE.write_text(render(document, recommended), encoding="utf-8")
    CHART.write_text(chart(document["results"]["compared"][0]), encoding="utf-8")


def render(document: Part, recommended: Part) -> str:
    """The whole page."""
    results = document["results"]
    lines = [_HEAD, _made_by(document), "", _REACH, *_reach(results["reach"]), ""]
    parts = recommended["results"]["recommended"]
    lines += [_RECOMMENDED, *_recommended(parts), "", _made_by(recommended), ""]
    for number, part in enumerate(results["compared"]):
        lines += [_COMPARED, *_heading(part), *_drops(part), ""]
        lines += [_CHART, ""] if number == 0 else []
        lines += [_READ, *_reads(part), ""]
    return "\n".join(lines)


def chart(part: Part) -> str:
    """Accuracy by method, over the part of the prefix that is kept; SVG."""
    ratios = sorted({one["ratio"] for one in part["methods"]})
    lines: dict[str, list[float]] = {"the whole prefix": [100 * part["accuracy"]] * len(ratios)}
    for name in dict.fromkeys(one["method"] for one in part["methods"]):
        found = {one["ratio"]: one for one in part["methods"] if one["method"] == name}
        lines[name] = [100 * part["accuracy"] - found[ratio]["drop_points"] for ratio in ratios]
    return line_chart(
        f"{part['model']} on {part['task']}",
        "part of the prefix that is kept, %",
        "right, %",
        [100 * ratio for ratio in ratios],
        lines,
        emphasised=("importance:last_pooled",),
        dashed=("the whole prefix",),
    )


def _recommended(parts: list[Part]) -> list[str]:
    ratios = [one["ratio"] for one in parts[0]["methods"]]
    rows = [
        [
            part["model"],
            str(part["probe_heads"]),
            percent(part["accuracy"]),
            *(f"{one['drop_points']:.1f} ± {one['standard_error_points']:.1f}" for one in part["methods"]),
            *(f"{one['read']:.0%}" for one in part["methods"] if one["ratio"] == _READ_AT),
        ]
        for part in parts
    ]
    titles = [f"{ratio:.0%} kept" for ratio in ratios]
    return table(["model", "probe heads", "whole prefix", *titles, f"read at {_READ_AT:.0%}"], rows)


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
