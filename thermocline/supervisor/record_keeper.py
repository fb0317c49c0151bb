"""Keeps the record of a running cell up to date. A full disk delays it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from shared import logs
from shared.errors import ConfigError, reason_of
from thermocline.supervisor.records import CellRecord, write_record

AGAIN_S = 5.0

_log = logs.get_logger("supervisor.record")


class RecordKeeper:
    """The writer of one cell's record, to each of its paths."""

    def __init__(self, record: Callable[[], CellRecord], paths: tuple[Path, ...]) -> None:
        """Write what ``record`` returns at each call to ``paths``; nothing is written before :meth:`begin`."""
        self._record = record
        self._paths = paths
        self._is_behind = False

    def begin(self) -> None:
        """Write the record for the first time. Raises ConfigError where that fails: no start could clean up."""
        for path in self._paths:
            try:
                write_record(self._record(), (path,))
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {reason_of(error)}") from error

    def update(self) -> None:
        """Write the record; where that fails, log it once and leave it to :meth:`repeat_for_ever`."""
        try:
            write_record(self._record(), self._paths)
        except OSError as error:
            if not self._is_behind:
                _log.warning("record_not_written", paths=[str(path) for path in self._paths], reason=reason_of(error))
            self._is_behind = True
        else:
            self._is_behind = False

    async def repeat_for_ever(self) -> None:
        """Write the record again every AGAIN_S seconds while the latest update has failed."""
        while True:
            await asyncio.sleep(AGAIN_S)
            if self._is_behind:
                self.update()

    def remove(self) -> None:
        """Remove the record from all paths. Raises OSError."""
        with ExitStack() as each:
            for path in self._paths:
                each.callback(path.unlink, missing_ok=True)
