"""Cleaning up after cells: everything of a dead one goes, nothing of a living one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.memory import SharedSegment
from shared.memory.segment import SHM_DIRECTORY
from thermocline.supervisor.leftovers import clean_up, kill_children, reap_dead_cells
from thermocline.supervisor.process_identity import is_same_process, own_identity, start_time
from thermocline.supervisor.records import CellRecord, ChildRecord, all_records, read_record, write_record


def make_record(data_dir: Path, *, owner: tuple[int, int], prefix: str, temporary: bool = True) -> CellRecord:
    """A cell without children."""
    return CellRecord(
        owner_pid=owner[0],
        owner_started=owner[1],
        base_url="http://127.0.0.1:1",
        nats_url="nats://127.0.0.1:2",
        data_dir=str(data_dir),
        data_dir_is_temporary=temporary,
        shm_prefix=prefix,
    )


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own group that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    yield process
    process.kill()
    process.wait()


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    """What is written is what is read, in every place it was written to."""
    record = make_record(tmp_path, owner=(1, 2), prefix="tc-x")
    write_record(record, (tmp_path / "a.json", tmp_path / "b.json"))

    assert read_record(tmp_path / "a.json") == record
    assert [found for _, found in all_records(tmp_path)] == [record, record]


def test_an_unreadable_record_is_no_record(tmp_path: Path) -> None:
    """Damage is skipped, not raised."""
    (tmp_path / "a.json").write_text("{")

    assert list(all_records(tmp_path)) == []


def test_a_dead_cell_is_removed(tmp_path: Path) -> None:
    """Its folder, its record and its shared memory go."""
    prefix = f"tctest-{os.getpid()}-dead"
    folder = tmp_path / prefix
    folder.mkdir()
    segment = SharedSegment.create(prefix, "device", 4096)
    record = make_record(folder, owner=(os.getpid(), 1), prefix=prefix)
    write_record(record, (tmp_path / f"{prefix}.json",))

    reaped = reap_dead_cells(tmp_path)

    assert reaped == [record]
    assert list(tmp_path.iterdir()) == []
    assert not (SHM_DIRECTORY / segment.name).exists()


def test_a_living_cell_is_left_alone(tmp_path: Path) -> None:
    """The supervisor that still runs keeps everything."""
    folder = tmp_path / "tc-alive"
    folder.mkdir()
    write_record(make_record(folder, owner=own_identity(), prefix="tc-alive"), (tmp_path / "tc-alive.json",))

    assert reap_dead_cells(tmp_path) == []
    assert folder.is_dir()


def test_a_folder_that_somebody_chose_is_kept(tmp_path: Path) -> None:
    """Only temporary folders are removed."""
    folder = tmp_path / "mine"
    folder.mkdir()

    clean_up(make_record(folder, owner=(1, 1), prefix="tc-mine", temporary=False), tmp_path)

    assert folder.is_dir()


def test_a_folder_outside_the_folder_of_runs_is_kept(tmp_path: Path) -> None:
    """A damaged record cannot make us delete anything else."""
    folder, runs = tmp_path / "precious", tmp_path / "runs"
    folder.mkdir()
    runs.mkdir()

    clean_up(make_record(folder, owner=(1, 1), prefix="tc-bad"), runs)

    assert folder.is_dir()


def test_children_of_a_dead_cell_are_killed(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """An orphan that ignored SIGTERM ends at the next start."""
    child = ChildRecord(name="worker-0", pid=sleeper.pid, started=start_time(sleeper.pid), state="running")
    record = make_record(tmp_path, owner=(1, 1), prefix="tc-y")
    killed = kill_children(msgspec.structs.replace(record, children=(child,)))

    assert killed == [sleeper.pid]
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_process_that_got_the_number_later_is_not_killed(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The start time tells an orphan from a stranger."""
    child = ChildRecord(name="worker-0", pid=sleeper.pid, started=start_time(sleeper.pid) - 1, state="running")
    record = make_record(tmp_path, owner=(1, 1), prefix="tc-z")
    killed = kill_children(msgspec.structs.replace(record, children=(child,)))

    assert killed == []
    assert is_same_process(sleeper.pid, start_time(sleeper.pid))
