"""Lets copies from devices take a part of the time only (Strata 4.2), so that loads have the link to themselves.

The paper gives loads, which requests wait for, two thread blocks of the GPU and backups, which no request waits for,
one. Copy engines and processor threads have no blocks; what they have is time. All copies of one storage take turns,
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
    """``share`` is above 0 and below 1. Used by all I/O threads of a storage."""

    share: float
    clock_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _free_s: float = float("-inf")

    def run(self, copy: Callable[[], None]) -> None:
        """Wait for the next turn, then copy; what that raises ends the turn as well."""
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
        self._pages, self._share = pages, share

    @property
    def handle(self) -> PoolHandle:
        return self._pages.handle

    @property
    def fault(self) -> str:
        """See ``DevicePages``."""
        return self._pages.fault

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """See ``DevicePages``."""
        self._share.run(lambda: self._pages.copy_run(run, into))

    def close(self) -> bool:
        """See ``DevicePages``."""
        return self._pages.close()
