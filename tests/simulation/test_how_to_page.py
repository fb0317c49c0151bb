"""The lines of ``docs/how-to/simulate.md`` are lines that the commands take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from markdown_it import MarkdownIt

from thermocline.simulate.__main__ import parse, prepare
from thermocline.simulate.axes import read_axes, runs_of
from thermocline.simulate.workloads import WORKLOADS
from thermocline.simulate.workloads.open_loop import OpenLoopOptions
from thermocline.trace.__main__ import parser as trace_parser

PAGE = Path(__file__).parents[2] / "docs/how-to/simulate.md"


def lines_of(command: str) -> list[list[str]]:
    """Arguments of a command, wherever the page shows it in a block."""
    blocks = [token.content for token in MarkdownIt().parse(PAGE.read_text(encoding="utf-8")) if token.type == "fence"]
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line[2:] for line in lines if line[:2] == ["thermocline", command]]


def test_simulations_can_be_made() -> None:
    """Each line of its own, and each combination of a sweep."""
    lines = lines_of("simulate")
    for line in lines:
        options = parse(line)
        for run in runs_of(options, read_axes(options.sweep)):
            prepare(run.options)

    assert [] in lines
    assert sum("--sweep" in line for line in lines) >= 3


def test_imports_are_understood() -> None:
    """With the verb and the flags that the page names."""
    options = [trace_parser().parse_args(line) for line in lines_of("trace")]

    assert [option.verb for option in options] == ["import"]


def test_every_option_of_every_workload_is_listed() -> None:
    """Those that many workloads take, once below the table."""
    page = PAGE.read_text(encoding="utf-8")
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = {row[0].strip("| `"): set(re.findall(r"`([a-z_]+)`", row[2])) for row in cells if len(row) == 3}
    (shared,) = re.findall(r"Workloads from `diurnal` on also take (.*), and have arrival times", page)

    for name, (options, _) in WORKLOADS.items():
        also = re.findall(r"`([a-z_]+)`", shared) if issubclass(options, OpenLoopOptions) else []
        assert set(options.__struct_fields__) <= listed[name].union(also), name
