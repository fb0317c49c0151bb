"""From a slot in shared memory to a tensor on the device, verified on the way.

What is used is what was verified: the bytes are hashed in a copy that no other process can reach. A storage that was
given up, but lives, may still write to a slot; it cannot change what was copied.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from services.worker.restore.pinned_turns import PinnedTurns
from shared.errors import SparsePrefixLost


class Landing:
    """Used by several threads at once. Pinned memory, which only a GPU needs, is taken when it is first used."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        """``most_bytes`` of one slot."""
        self._device, self._most_bytes = device, most_bytes
        self._turns: PinnedTurns | None = None
        self._lock = threading.Lock()

    def land(self, memory: npt.NDArray[np.uint8], checksum: int) -> torch.Tensor:
        """Return a copy of ``memory`` on the device, uint8 ``[n]``; ``memory`` is not read any more.

        On a GPU the copy is ordered like kernels of the current stream. Raises SparsePrefixLost if it is not what the
        storage has read.
        """
        if self._device.type != "cuda":
            copied = memory.copy()
            _verify(copied, checksum)
            return torch.from_numpy(copied)
        with self._lock:
            if self._turns is None:
                self._turns = PinnedTurns(self._device, self._most_bytes)
            with self._turns.next(len(memory)) as pinned:
                staged = pinned.numpy()
                staged[:] = memory
                _verify(staged, checksum)
                return pinned.to(self._device, non_blocking=True)


def _verify(copied: npt.NDArray[np.uint8], checksum: int) -> None:
    if xxhash.xxh3_64_intdigest(copied.data) != checksum:
        raise SparsePrefixLost("what a storage has read arrived altered")
