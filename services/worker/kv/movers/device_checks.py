"""Checks of rows on the GPU that they have arrived on, behind their copy and beside the next one.

The bytes that are checked are those that attention will read. Checks have a stream of their own, so that the link does
not rest while rows are hashed: of a long load only the last piece's check is not hidden by a copy.
"""

from __future__ import annotations

import numpy as np
import torch

from services.worker.kernels.row_checksums import can_check, check_rows, constants_on, sums_for
from services.worker.kv.movers.piece_slots import PieceSlot, PieceVerdict, Sent
from services.worker.kv.movers.protocol import Fence
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import PageMemory

__all__ = ["DeviceChecks", "can_check"]


class DeviceChecks:
    """Checks rows of one device pool, of a length that ``can_check``; used by one thread."""

    def __init__(self, memory: PageMemory, pool: torch.Tensor, piece_pages: int) -> None:
        """``pool`` is the flat uint8 memory of ``memory``, and a piece has at most ``piece_pages`` pages."""
        self._pool, self._layout = pool, memory.layout
        self._constants = constants_on(pool.device)
        self._sums = sums_for(memory.layout.half_bytes, piece_pages, pool.device)
        self._stream = side_stream(pool.device)

    def launch(
        self, slot: PieceSlot, sent: Sent, layer: int, copied: Fence | None, count: int, wanted: np.ndarray
    ) -> PieceVerdict:
        """Check ``layer`` of what ``sent`` says behind ``copied``; the verdict is on ``count`` pages, of which the
        entries ``wanted`` are checked.
        """
        self._stream.wait(copied)
        with self._stream:
            self._check(sent, layer)
            slot.fetch(len(wanted))
        verdict = PieceVerdict(slot, count, wanted)
        slot.use_until(self._stream.fence(), (verdict, len(wanted)))
        return verdict

    def warm_up(self, nothing: Sent) -> None:
        """Compile the kernels; ``nothing`` is checked."""
        with self._stream:
            self._check(nothing, 0)

    def fence_behind(self, *fences: Fence | None) -> Fence | None:
        """A point behind all checks so far and behind ``fences`` of other streams."""
        for fence in fences:
            self._stream.wait(fence)
        return self._stream.fence()

    def drain(self) -> None:
        """Wait for all checks so far."""
        self._stream.drain()

    def _check(self, sent: Sent, layer: int) -> None:
        check_rows(
            self._pool, self._layout, layer, sent.checked, sent.seeds, sent.expected, sent.wrong,
            constants=self._constants, sums=self._sums,
        )  # fmt: skip
