"""Commands that are not told of a broker speak to the cell of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.memory.segment_name import process_start_time
from thermocline.supervisor.local_cell import SeveralCells, broker_flags
from thermocline.supervisor.records import CellRecord, write_record


def record(folder: Path, name: str, *, started: int | None = None) -> None:
    """A cell whose supervisor is this process, or one that started at another time under its pid."""
    mine = process_start_time(os.getpid())
    assert mine is not None
    write_record(
        CellRecord(
            owner_pid=os.getpid(),
            owner_started=mine if started is None else started,
            base_url=f"http://{name}",
            nats_url=f"nats://operator:secret@{name}:4222",
            data_dir=f"/data/{name}",
            data_dir_is_temporary=True,
            shm_prefix=name,
        ),
        (folder / f"{name}.json",),
    )


def test_the_only_cell_that_runs_is_meant(tmp_path: Path) -> None:
    """Records of cells that ended without taking theirs away are passed over; without a cell nothing is added."""
    record(tmp_path, "ended", started=1)
    assert broker_flags(["stat"], {}, tmp_path) == []

    record(tmp_path, "runs")
    assert broker_flags(["stat"], {}, tmp_path) == ["--nats", "nats://operator:secret@runs:4222"]


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["stat", "--nats", "nats://elsewhere:4222"], {}),
        (["stat", "--nats=nats://elsewhere:4222"], {}),
        (["stat", "--nats-user", "operator"], {}),
        (["stat", "--help"], {}),
        (["stat"], {"THERMOCLINE_NATS": "nats://elsewhere:4222"}),
        (["stat"], {"THERMOCLINE_NATS_CREDENTIALS": "/file.creds"}),
    ],
)
def test_who_names_a_broker_means_that_one(tmp_path: Path, arguments: list[str], environ: dict[str, str]) -> None:
    """By flags or by the environment; help needs none."""
    record(tmp_path, "runs")

    assert broker_flags(arguments, environ, tmp_path) == []


def test_of_several_cells_none_is_guessed(tmp_path: Path) -> None:
    """The message tells them apart, without their passwords."""
    record(tmp_path, "one")
    record(tmp_path, "two")

    with pytest.raises(SeveralCells) as caught:
        broker_flags(["stat"], {}, tmp_path)

    assert "http://one" in str(caught.value)
    assert "/data/two" in str(caught.value)
    assert "secret" not in str(caught.value)
