"""Removes a cell's leftovers: its shared memory, its temporary folder, and processes of a dead supervisor."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

from shared.memory import unlink_all
from thermocline.supervisor.data_lock import lock_of_ended
from thermocline.supervisor.process_identity import is_child_of, is_same_process, own_place
from thermocline.supervisor.records import CellRecord, all_records


def kill_children(record: CellRecord) -> list[int]:
    """Kill the children of ``record`` that still run, with their process groups; return their pids.

    A record is a file, which may be damaged: only processes that its supervisor started here are killed.
    """
    if record.place not in (None, own_place()):
        return []
    killed = []
    for child in record.children:
        if is_same_process(child.pid, child.started) and is_child_of(child.pid, record.owner_pid):
            try:
                os.killpg(child.pid, signal.SIGKILL)
                killed.append(child.pid)
            except (ProcessLookupError, PermissionError):
                pass  # It ended in between, or is not ours to end.
    return killed


def clean_up(record: CellRecord, runs: Path) -> None:
    """Remove all leftovers of ``record`` and the record; the data folder only if it was temporary.

    The caller holds the folder's lock if there is one. Raises OSError where the record cannot be removed.
    """
    kill_children(record)
    unlink_all(record.shm_prefix)
    # A damaged record must not lead to the deletion of a folder of another owner.
    if record.data_dir_is_temporary and _is_beside_records(record, runs):
        shutil.rmtree(record.data_dir, ignore_errors=True)
    (runs / f"{record.shm_prefix}.json").unlink(missing_ok=True)


def reap_dead_cells(runs: Path) -> list[CellRecord]:
    """Clean up after every recorded cell that has ended; return their records.

    A cell runs as long as it holds the lock of its data folder. Its pid is asked, too, where it means anything here.
    """
    reaped = []
    for path, record in all_records(runs):
        with ExitStack() as locks:
            if _has_ended(record, runs, locks):
                clean_up(record, runs)
                path.unlink(missing_ok=True)
                reaped.append(record)
    return reaped


def _has_ended(record: CellRecord, runs: Path, locks: ExitStack) -> bool:
    """Return whether a cell has ended; its folder is then locked until ``locks`` are released."""
    here = own_place()
    there = record.place or here
    if there == here and is_same_process(record.owner_pid, record.owner_started):
        return False
    is_restarted = there.boot_id != here.boot_id
    # Another machine may share the folder of records: its kernel does not show all its locks.
    if is_restarted and there.host_name != here.host_name:
        return False
    # Another container may have another folder under this name.
    if there != here and not is_restarted and not _is_beside_records(record, runs):
        return False
    try:
        lock = lock_of_ended(Path(record.data_dir))
    except FileNotFoundError:
        return there == here
    if lock is None:
        return False
    locks.enter_context(lock)
    return True


def _is_beside_records(record: CellRecord, runs: Path) -> bool:
    data_dir = Path(record.data_dir)
    return data_dir.parent == runs and data_dir.name != ".."
