"""A bound on the part of the time in which devices are copied from, so that loads find the link free (Strata 4.2).

The paper gives loads, which requests wait for, two thread blocks of the GPU and backups, which no request waits for,
one. Copy engines and processor threads have no blocks, so their time is divided. All copies of one storage take turns,
and after each run of pages nothing is copied until their share of the time is right again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.storage import measures
from shared.memory.device_pool_view import DevicePages, DeviceRun
from shared.messages.pools import PoolHandle


@dataclass(slots=True)
class CopyShare:
    """Turns of copies. ``share`` is above 0 and below 1. Used by all I/O threads of a storage."""

    share: float
    clock_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _free_s: float = float("-inf")

    def run(self, copy: Callable[[], None]) -> None:
        """Wait for the next turn, then run ``copy``; an exception ends the turn as well."""
        with self._turn:
            left_s = self._free_s - self.clock_s()
            if left_s > 0:
                self.sleep(left_s)
                measures.COPY_PAUSES.inc(left_s)
            began_s = self.clock_s()
            try:
                copy()
            finally:
                ended_s = self.clock_s()
                self._free_s = ended_s + (ended_s - began_s) * (1 - self.share) / self.share


class SharedDevicePages:
    """A device pool that is copied from by turns. Satisfies ``shared.memory.device_pool_view.DevicePages``."""

    def __init__(self, pages: DevicePages, share: CopyShare) -> None:
        """Copy from ``pages``, which :meth:`close` closes, in turns of ``share``, common to all device pools."""
        self._pages, self._share = pages, share

    @property
    def handle(self) -> PoolHandle:
        """Handle of the device pool underneath."""
        return self._pages.handle

    @property
    def fault(self) -> str:
        """Fault of the device pool underneath."""
        return self._pages.fault

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """Copy a run of pages when it is its turn; see ``DevicePages``."""
        self._share.run(lambda: self._pages.copy_run(run, into))

    def close(self) -> bool:
        """Close the device pool underneath; see ``DevicePages``."""
        return self._pages.close()
