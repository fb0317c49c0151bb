"""``thermocline simulate --sweep``: simulate with a progress line, print a table, write files."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from shared.progress_line import shown
from thermocline.simulate.axes import Axis, Row, read_axes
from thermocline.simulate.sweep_report import (
    check_outputs,
    show_sweep,
    sweep_chart,
    title_of,
    write_csv,
    write_parquet,
    write_plot,
)
from thermocline.simulate.sweeping import sweep_rows

_PIPED_WIDTH = 160


def run_sweep(options: argparse.Namespace) -> None:
    """Simulate and report. Raises ConfigError or InvalidRequest for invalid input, OperatorError for a file."""
    axes = read_axes(options.sweep)
    check_outputs(axes, csv_file=options.csv, parquet=options.parquet, plot=options.plot)
    rows = _with_progress(options, axes)
    if options.json:
        print(json.dumps({"runs": rows}))
    else:
        console = Console()
        title = f"{title_of(rows, axes)}: {len(rows):,} simulations"
        # A file or pipe has no width, so a table gets enough of it.
        show_sweep(console if console.is_terminal else Console(width=_PIPED_WIDTH), rows, axes, title)
    if options.csv:
        write_csv(options.csv, rows)
    if options.parquet:
        write_parquet(options.parquet, rows)
    if options.plot:
        write_plot(options.plot, sweep_chart(rows, axes, options.plot_figure))


def _with_progress(options: argparse.Namespace, axes: tuple[Axis, ...]) -> list[Row]:
    """Return the rows of the sweep; show progress on standard error where that is a terminal."""
    with shown("simulations", 0) as bar:
        return sweep_rows(options, axes, bar.update)
