"""``thermocline simulate --sweep``: simulate with a progress line, print a table, write files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from rich.console import Console

from shared.progress_line import shown
from thermocline.simulate.axes import Axis, Row, read_axes
from thermocline.simulate.sweep_report import (
    check_outputs,
    ended,
    show_sweep,
    sweep_chart,
    title_of,
    write_csv,
    write_parquet,
    write_plot,
)
from thermocline.simulate.sweeping import SweepFailed, SweepInterrupted, sweep_rows

_PIPED_WIDTH = 160


def run_sweep(options: argparse.Namespace) -> bool:
    """Simulate and report; return whether all simulations ended. Those that failed are named on standard error.

    Raises ConfigError or InvalidRequest for invalid input, OperatorError for a file, and SweepInterrupted by Ctrl-C,
    after reporting the simulations that had ended.
    """
    axes = read_axes(options.sweep)
    check_outputs(axes, csv_file=options.csv, parquet=options.parquet, plot=options.plot)
    warnings: list[str] = []
    failure = None
    try:
        rows = _with_progress(options, axes, warnings.append)
    except SweepFailed as error:
        rows, failure = error.rows, error.message
    except SweepInterrupted as interrupt:
        done = len(ended(interrupt.rows))
        print(f"thermocline simulate: interrupted; {done} of {len(interrupt.rows)} simulations ended", file=sys.stderr)
        if done:
            _report(options, axes, interrupt.rows)
        raise
    for text in (*warnings, *([failure] if failure is not None else [])):
        print(f"thermocline simulate: {text}", file=sys.stderr)
    _report(options, axes, rows)
    return failure is None


def _report(options: argparse.Namespace, axes: tuple[Axis, ...], rows: list[Row]) -> None:
    """Print and write the rows. A chart needs a simulation that ended."""
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
    done = ended(rows)
    if options.plot and done:
        write_plot(options.plot, sweep_chart(done, axes, options.plot_figure))


def _with_progress(options: argparse.Namespace, axes: tuple[Axis, ...], warn: Callable[[str], None]) -> list[Row]:
    """Return the rows of the sweep; show progress on standard error where that is a terminal."""
    with shown("simulations", 0) as bar:
        return sweep_rows(options, axes, bar.update, warn)
