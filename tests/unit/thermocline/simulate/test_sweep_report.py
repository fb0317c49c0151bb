"""What a sweep writes: tables, CSV, Parquet and charts, from rows that are given."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shared.errors import ConfigError, OperatorError
from thermocline.simulate.axes import Axis, Row
from thermocline.simulate.sweep_report import (
    FIGURES,
    check_outputs,
    show_sweep,
    sweep_chart,
    write_csv,
    write_parquet,
    write_plot,
)

_CAPACITY = Axis("device_tokens", (2000, 1000))
_POLICY = Axis("policy", ("lru", "sieve"))


def row(policy: str, capacity: int, ratio: float, **more: object) -> Row:
    """A row with the columns that reports look at."""
    figures = dict.fromkeys(FIGURES, 1.5)
    return {
        "policy": policy,
        "device_tokens": capacity,
        "workload": "sample trace",
        "hardware": "h",
        "model": "m",
        "input_tokens": 100,
        "hit_tokens_device": 25,
        **figures,
        "hit_ratio": ratio,
        **more,
    }


ROWS = [row("lru", 2000, 0.5), row("lru", 1000, 0.25), row("sieve", 2000, 0.75), row("sieve", 1000, 0.125)]


def test_a_table_has_a_line_for_each_simulation() -> None:
    """With what was swept and the figures that most comparisons are about."""
    console = Console(file=io.StringIO(), width=160)
    show_sweep(console, [row("lru", 2000, 0.5, failed_overloaded=3), *ROWS[1:]], (_POLICY, _CAPACITY), "a title")

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    first = next(line for line in text.splitlines() if "lru" in line)
    assert [cell.strip() for cell in first.split("│")[1:5]] == ["lru", "2,000", "0.5000", "25.0%"]
    assert first.split("│")[-2].strip() == "3"
    assert "a title" in text


def test_csv_has_every_column(tmp_path: Path) -> None:
    """What a row lacks is empty."""
    path = tmp_path / "runs.csv"
    write_csv(path, [ROWS[0] | {"failed_overloaded": None}, ROWS[1] | {"failed_overloaded": 2}])

    with path.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["failed_overloaded"] for line in read] == ["", "2"]
    assert list(read[0]) == [*ROWS[0], "failed_overloaded"]
    assert read[0]["hit_ratio"] == "0.5"


def test_parquet_has_the_columns_with_their_types(tmp_path: Path) -> None:
    """What is read back is what was written."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    path = tmp_path / "runs.parquet"
    rows = [line | {"failed_overloaded": failed} for line, failed in zip(ROWS, (None, 2, None, None), strict=True)]
    write_parquet(path, rows)

    read = parquet.read_table(path)
    assert read.to_pylist() == rows
    assert {str(read.schema.field(name).type) for name in ("device_tokens", "failed_overloaded")} == {"int64"}
    assert str(read.schema.field("hit_ratio").type) == "double"


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is simulated, and where it is written."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError, match=r"pip install 'thermocline\[parquet\]'"):
        check_outputs([_CAPACITY], csv_file=None, parquet=tmp_path / "runs.parquet", plot=None)
    with pytest.raises(ConfigError, match=r"pip install 'thermocline\[parquet\]'"):
        write_parquet(tmp_path / "runs.parquet", ROWS)


def test_what_could_not_be_written_is_said_first(tmp_path: Path) -> None:
    """All of it at once."""
    with pytest.raises(ConfigError) as refused:
        check_outputs([_POLICY], csv_file=tmp_path / "no" / "a.csv", parquet=None, plot=tmp_path / "a.svg")

    assert "no is no folder; --plot needs a setting in --sweep with two numbers" in refused.value.message


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    """A folder stands where a file should."""
    with pytest.raises(OperatorError, match="cannot write"):
        write_csv(tmp_path, ROWS)
    with pytest.raises(OperatorError, match="cannot write"):
        write_plot(tmp_path, "<svg/>")


def test_a_chart_has_a_line_for_each_combination_of_the_other_settings() -> None:
    """Over the setting of numbers, in rising order; the legend ranks them by their last value."""
    chart = sweep_chart(ROWS, (_POLICY, _CAPACITY))

    assert chart.count("<polyline") == 2
    assert chart.index(">1,000<") < chart.index(">2,000<")
    assert "lru 0.500" in chart
    assert "sieve 0.750" in chart


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_can_be_drawn(figure: str) -> None:
    """With its own title."""
    assert FIGURES[figure] in sweep_chart(ROWS, (_POLICY, _CAPACITY), figure)


def test_lines_of_several_settings_name_each() -> None:
    """One value alone would not say of what."""
    seeds = Axis("seed", (1, 2))
    rows = [line | {"seed": seed} for seed in seeds.values for line in ROWS]

    assert "policy=lru, seed=2 0.500" in sweep_chart(rows, (_POLICY, _CAPACITY, seeds))


def test_a_folder_in_a_files_place_is_said_first(tmp_path: Path) -> None:
    """By the flag's name, before anything is simulated."""
    with pytest.raises(ConfigError) as refused:
        check_outputs([_CAPACITY], csv_file=tmp_path, parquet=None, plot=tmp_path)

    assert refused.value.message == (
        f"--csv {tmp_path} cannot be written: it is a folder; --plot {tmp_path} cannot be written: it is a folder"
    )


def test_a_figure_that_cannot_be_written_leaves_the_earlier_file(tmp_path: Path) -> None:
    """The file that a link names is replaced, and the link stays."""
    link, path = tmp_path / "link.csv", tmp_path / "runs.csv"
    link.symlink_to(path)
    write_csv(link, ROWS)
    before = path.read_bytes()

    with pytest.raises(ValueError, match="not in fieldnames"):
        write_csv(link, [ROWS[0], {"other": 1}])

    assert link.is_symlink()
    assert path.read_bytes() == before
