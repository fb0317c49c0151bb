"""Removes a cell's leftovers: its shared memory, its temporary folder, and processes of a dead supervisor."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from shared.memory import unlink_all
from thermocline.supervisor.process_identity import is_same_process
from thermocline.supervisor.records import CellRecord, all_records


def kill_children(record: CellRecord) -> list[int]:
    """Kill the children of ``record`` that still run, with their process groups; return their pids."""
    killed = []
    for child in record.children:
        if is_same_process(child.pid, child.started):
            try:
                os.killpg(child.pid, signal.SIGKILL)
                killed.append(child.pid)
            except (ProcessLookupError, PermissionError):
                pass  # It ended in between, or is not ours to end.
    return killed


def clean_up(record: CellRecord, runs: Path) -> None:
    """Remove all leftovers of ``record`` and the record; the data folder only if it was temporary."""
    kill_children(record)
    unlink_all(record.shm_prefix)
    data_dir = Path(record.data_dir)
    # A damaged record must not lead to the deletion of a folder of another owner.
    if record.data_dir_is_temporary and data_dir.parent == runs:
        shutil.rmtree(data_dir, ignore_errors=True)
    (runs / f"{record.shm_prefix}.json").unlink(missing_ok=True)


def reap_dead_cells(runs: Path) -> list[CellRecord]:
    """Clean up after every recorded cell whose supervisor has ended; return their records."""
    reaped = []
    for path, record in all_records(runs):
        if not is_same_process(record.owner_pid, record.owner_started):
            clean_up(record, runs)
            path.unlink(missing_ok=True)
            reaped.append(record)
    return reaped
