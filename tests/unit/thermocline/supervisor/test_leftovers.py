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
from thermocline.supervisor.data_lock import lock_data_dir
from thermocline.supervisor.leftovers import clean_up, kill_children, reap_dead_cells
from thermocline.supervisor.process_identity import Place, is_same_process, own_identity, own_place, start_time
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


OWNER = 1
"""Pid of the supervisor in the records of dead cells with children."""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own group that does nothing, as a supervisor starts one."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        process_group=0,
        env={**os.environ, "THERMOCLINE_SUPERVISED": str(OWNER)},
    )
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


def test_a_process_that_no_supervisor_of_this_cell_started_is_not_killed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """A record is a file, which may say anything."""
    child = ChildRecord(name="worker-0", pid=sleeper.pid, started=start_time(sleeper.pid), state="running")
    record = make_record(tmp_path, owner=(OWNER + 1, 1), prefix="tc-w")
    killed = kill_children(msgspec.structs.replace(record, children=(child,)))

    assert killed == []
    assert is_same_process(sleeper.pid, start_time(sleeper.pid))


def test_a_cell_that_holds_its_lock_is_left_alone(tmp_path: Path) -> None:
    """Its supervisor may run where no pid is known here: in another container with the same TMPDIR."""
    folder = tmp_path / "tc-locked"
    folder.mkdir()
    record = make_record(folder, owner=(os.getpid(), 1), prefix="tc-locked")
    write_record(record, (tmp_path / "tc-locked.json",))

    with lock_data_dir(folder):
        assert reap_dead_cells(tmp_path) == []
        assert folder.is_dir()
    assert reap_dead_cells(tmp_path) == [record]
    assert not folder.exists()


def placed(folder: Path, place: Place) -> CellRecord:
    """The record of a dead cell of that place, written down in the folder's parent."""
    folder.mkdir()
    record = msgspec.structs.replace(make_record(folder, owner=(OWNER, 1), prefix=folder.name), place=place)
    write_record(record, (folder.parent / f"{folder.name}.json",))
    return record


OTHER_CONTAINER = msgspec.structs.replace(own_place(), pid_namespace=1)
BEFORE_RESTART = msgspec.structs.replace(own_place(), boot_id="before")
OTHER_MACHINE = msgspec.structs.replace(BEFORE_RESTART, host_name="other")


@pytest.mark.parametrize(
    ("place", "is_reaped"), [(OTHER_CONTAINER, True), (BEFORE_RESTART, True), (OTHER_MACHINE, False)]
)
def test_a_cell_of_another_place_is_judged_by_its_lock_alone(tmp_path: Path, place: Place, is_reaped: bool) -> None:
    """Without a lock nothing is known of it. Locks of another machine's kernel are not always seen here."""
    record = placed(tmp_path / "tc-there", place)
    assert reap_dead_cells(tmp_path) == []

    lock_data_dir(tmp_path / "tc-there").close()
    reaped = reap_dead_cells(tmp_path)

    assert reaped == ([record] if is_reaped else [])


def test_a_folder_that_another_container_may_call_otherwise_says_nothing(tmp_path: Path) -> None:
    """Only folders beside the records are the same there as here."""
    runs, folder = tmp_path / "runs", tmp_path / "data"
    runs.mkdir()
    folder.mkdir()
    record = make_record(folder, owner=(OWNER, 1), prefix="tc-named", temporary=False)
    write_record(msgspec.structs.replace(record, place=OTHER_CONTAINER), (runs / "tc-named.json",))
    lock_data_dir(folder).close()

    assert reap_dead_cells(runs) == []


def test_no_process_is_killed_by_a_pid_of_another_place(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The number means another process there."""
    child = ChildRecord(name="worker-0", pid=sleeper.pid, started=start_time(sleeper.pid), state="running")
    record = make_record(tmp_path, owner=(OWNER, 1), prefix="tc-v")
    here = msgspec.structs.replace(record, children=(child,), place=own_place())

    for place in (OTHER_CONTAINER, BEFORE_RESTART, OTHER_MACHINE):
        assert kill_children(msgspec.structs.replace(here, place=place)) == []
    assert kill_children(here) == [sleeper.pid]


def test_records_of_earlier_releases_can_be_read(tmp_path: Path) -> None:
    """They say nothing of their place, which is taken for this one."""
    record = make_record(tmp_path / "gone", owner=(OWNER, 1), prefix="tc-old")
    told = msgspec.to_builtins(record)
    told.pop("place")
    (tmp_path / "tc-old.json").write_bytes(msgspec.json.encode(told))

    assert reap_dead_cells(tmp_path) == [record]
