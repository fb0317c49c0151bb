"""Memory and thread by which hidden states reach a device, made when a restoration first needs them.

Most workers never restore, so nothing is allocated before the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from services.worker.restore.pinned_turns import PinnedTurns, pinned_turns
from services.worker.restore.staging import StagingMemory
from services.worker.thread_device import use_device


class Transmission:
    """What one restoration after another uses. Owned by the compute thread."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        """Prepare; staging memory will have ``staging_bytes`` bytes on ``device``."""
        self._device, self._staging_bytes = device, staging_bytes
        self._staging: StagingMemory | None = None
        self._turns: PinnedTurns | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def staging(self) -> StagingMemory:
        """Memory for hidden states on the device."""
        if self._staging is None:
            self._staging = StagingMemory(self._staging_bytes, self._device)
        return self._staging

    def turns(self, unit_bytes: int) -> PinnedTurns | None:
        """Return buffers for units of this size, or larger; None where the device uses host memory."""
        if self._turns is None or self._turns.nbytes < unit_bytes:
            self._turns = pinned_turns(self._device, unit_bytes)
        return self._turns

    def submit(self, work: Callable[[], None]) -> None:
        """Do ``work`` in the thread, behind earlier work."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                max_workers=1, thread_name_prefix="restoring", initializer=partial(use_device, self._device)
            )
        self._thread.submit(work)

    def close(self) -> None:
        """End the thread once it is idle."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
