"""Rows of a sweep as a table in the terminal, as CSV, as Parquet, and as a chart."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.errors import ConfigError, OperatorError, reason_of
from shared.result_file import check_writable, result_file, write_result
from thermocline.charts.drawing import Svg
from thermocline.charts.line_chart import line_chart
from thermocline.simulate.axes import ERROR, INTERRUPTED, Axis, Row

FIGURES = {
    "hit_ratio": "hit tokens / prompt tokens",
    "ttft_ms_mean": "TTFT, mean, ms",
    "ttft_ms_p50": "TTFT, p50, ms",
    "ttft_ms_p99": "TTFT, p99, ms",
    "tpot_ms_mean": "time per output token, mean, ms",
    "latency_ms_mean": "latency, mean, ms",
    "latency_ms_p99": "latency, p99, ms",
    "throughput_requests_per_s": "requests a second",
    "throughput_input_tokens_per_s": "input tokens a second",
    "throughput_output_tokens_per_s": "output tokens a second",
    "compute_seconds": "seconds of compute",
    "stall_seconds": "seconds of stall",
    "evicted_tokens_device": "tokens evicted from devices",
}
"""Figures that a chart can show, with the title of its vertical axis."""

_NO_PYARROW = "--parquet needs pyarrow, which is not installed: pip install 'thermocline[parquet]'"


def check_outputs(axes: Sequence[Axis], *, csv_file: Path | None, parquet: Path | None, plot: Path | None) -> None:
    """Raise ConfigError, before the simulations, for outputs that could not be written."""
    faults = []
    for flag, file in (("--csv", csv_file), ("--parquet", parquet), ("--plot", plot)):
        try:
            if file is not None:
                check_writable(file, flag)
        except OperatorError as error:
            faults.append(error.message)
    if parquet is not None and importlib.util.find_spec("pyarrow") is None:
        faults.append(_NO_PYARROW)
    if plot is not None and not any(axis.is_number for axis in axes):
        faults.append("--plot needs a setting in --sweep with two numbers at least, for the horizontal axis")
    if faults:
        raise ConfigError("; ".join(faults))


def ended(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of simulations that ended, without those that failed."""
    return [row for row in rows if row.get(ERROR) is None]


def show_sweep(console: Console, rows: Sequence[Row], axes: Sequence[Axis], title: str) -> None:
    """Print one line per simulation: its swept values, then the main figures, or that it failed or was interrupted."""
    table = Table(title=title, title_justify="left")
    for axis in axes:
        table.add_column(axis.key, justify="right" if axis.is_number else "left")
    tiers = [name for name in rows[0] if name.startswith("hit_tokens_")]
    for heading in ("hit ratio", *(name.removeprefix("hit_tokens_") for name in tiers), "TTFT p50", "TTFT p99"):
        table.add_column(heading, justify="right")
    for heading in ("latency p99", "requests/s", "failed"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.get(ERROR) is not None:
            word = INTERRUPTED if row[ERROR] == INTERRUPTED else "failed"
            table.add_row(*(_number(row[axis.key]) for axis in axes), word)
            continue
        prompt = max(1, row["input_tokens"])
        failed = sum(value or 0 for name, value in row.items() if name.startswith("failed_"))
        table.add_row(
            *(_number(row[axis.key]) for axis in axes),
            f"{row['hit_ratio']:.4f}",
            *(f"{(row[name] or 0) / prompt:.1%}" for name in tiers),
            *(f"{row[name]:,.0f} ms" for name in ("ttft_ms_p50", "ttft_ms_p99", "latency_ms_p99")),
            f"{row['throughput_requests_per_s']:,.2f}",
            f"{failed:,}",
        )
    console.print(table)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write a heading and one line per simulation. Raises OperatorError where the file cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_result(path, text.getvalue().encode())


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write the columns of the CSV with their types. Raises ConfigError without pyarrow, OperatorError for the file."""
    try:
        from pyarrow import Table as Columns
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(_NO_PYARROW) from error
    try:
        with result_file(path) as file:
            parquet.write_table(Columns.from_pylist(list(rows)), file)
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {reason_of(error)}") from error


def write_plot(path: Path, chart: str) -> None:
    """Write the text of a chart. Raises OperatorError where the file cannot be written."""
    write_result(path, chart.encode())


def sweep_chart(rows: Sequence[Row], axes: Sequence[Axis], figure: str = "hit_ratio") -> Svg:
    """Draw a figure over the first numeric axis, with a line for each combination of the others."""
    across = next(axis for axis in axes if axis.is_number)
    others = [axis for axis in axes if axis is not across]
    lines: dict[str, dict[float, float]] = {}
    for row in sorted(rows, key=lambda row: float(row[across.key])):
        lines.setdefault(_name(row, others), {})[row[across.key]] = row[figure]
    # In the order of the rows, not of the sorted ones.
    named = dict.fromkeys(_name(row, others) for row in rows)
    title = f"{FIGURES[figure]}: {title_of(rows, axes)}"
    return line_chart(title, across.key, FIGURES[figure], {name: lines[name] for name in named})


def title_of(rows: Sequence[Row], axes: Sequence[Axis]) -> str:
    """Return the workload, hardware and model that all simulations share."""
    swept = [axis.key for axis in axes]
    first = (ended(rows) or rows)[0]
    return ", ".join(str(first.get(key)) for key in ("workload", "hardware", "model") if key not in swept)


def _name(row: Row, axes: Sequence[Axis]) -> str:
    """Return the name of a row's line: the value of the one other setting, or each with its key."""
    if len(axes) == 1:
        return str(row[axes[0].key])
    return ", ".join(f"{axis.key}={row[axis.key]}" for axis in axes) or "all"
