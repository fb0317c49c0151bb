"""Two pinned buffers, used in turn for copies to a GPU.

While one crosses the link, the next rows are gathered and verified into the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shared.errors import InvariantViolated

# torch leaves these functions without types.
_cuda: Any = torch.cuda

TURN_BYTES = 4 * 2**20
"""Size of a buffer: the copy engine needs transfers of a megabyte or more to come near the link's bandwidth (Strata
section 3.1).
"""


class PinnedTurns:
    """Two pinned buffers. Used by one thread; allocated once, for one restoration after another."""

    def __init__(self, device: torch.device, nbytes: int = TURN_BYTES) -> None:
        """Allocate two buffers of ``nbytes`` each."""
        self.nbytes = nbytes
        self._device = device
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._is_free: list[Any] = [None, None]
        self._turn = 0

    @contextmanager
    def next(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Open the first ``nbytes`` of the next buffer, uint8.

        Copies out of it go to the current stream, inside the block. Raises InvariantViolated when a buffer is smaller.
        """
        if nbytes > self.nbytes:
            raise InvariantViolated(f"{nbytes} bytes do not fit in a turn of {self.nbytes}")
        turn = self._turn = 1 - self._turn
        if self._is_free[turn] is not None:
            self._is_free[turn].synchronize()
        try:
            yield self._buffers[turn][:nbytes]
        finally:
            self._is_free[turn] = _cuda.current_stream(self._device).record_event()


def pinned_turns(device: torch.device, unit_bytes: int) -> PinnedTurns | None:
    """Return buffers for units of this size to be copied to ``device``; None where the device uses host memory."""
    return PinnedTurns(device, max(TURN_BYTES, unit_bytes)) if device.type == "cuda" else None
