"""Checks of rows on the GPU to which they were copied, behind their copy and beside the next one.

The bytes that are checked are those that attention will read. Checks have a stream of their own, so that the link does
not idle while rows are hashed: of a long load only the last piece's check is not hidden by a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from services.worker.kernels.row_checksums import can_check, check_rows, constants_on, sums_for
from services.worker.kv.movers.piece_slots import PieceSlot, PieceVerdict, Sent
from services.worker.kv.movers.protocol import Fence
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import PageMemory

__all__ = ["DeviceChecks", "can_check"]


TRIED_SEEDS = (0, 2**64 - 1, 0x9E3779B185EBCA87, 1)


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
        """Check ``layer`` of the pages in ``sent``, behind the copy's fence ``copied``; return the verdict.

        The verdict is on ``count`` pages; of these the entries ``wanted`` are checked.
        """
        self._stream.wait(copied)
        with self._stream:
            self._check(sent, layer)
            slot.fetch(len(wanted))
        verdict = PieceVerdict(slot, count, wanted)
        slot.use_until(self._stream.fence(), (verdict, len(wanted)))
        return verdict

    def agree_with_xxhash(self) -> bool:
        """Compile the kernels; return whether they give the right verdicts on this device.

        They are tried on layer 0 of the first pages, which have no other use meanwhile; the previous contents are
        restored.
        """
        layout, on = self._layout, self._pool.device
        count = min(layout.pages, len(TRIED_SEEDS))
        strides = (layout.page_stride, layout.half_stride, 1)
        with self._stream:
            rows = self._pool.as_strided((count, 2, layout.half_bytes), strides)
            before = rows.clone()
            tried = torch.arange(rows.numel(), dtype=torch.int64).mul_(0x9E3779B1).bitwise_right_shift_(16)
            tried = tried.to(torch.uint8).view(rows.shape)
            rows.copy_(tried)
            wrong = torch.full((count,), 2, dtype=torch.uint8, device=on)
            expected = [
                xxhash.xxh3_64_intdigest(tried[page].numpy().tobytes(), seed=seed) ^ (page % 2)
                for page, seed in enumerate(TRIED_SEEDS[:count])
            ]
            check_rows(
                self._pool, layout, 0, torch.arange(count, dtype=torch.int32).to(on), _words(TRIED_SEEDS[:count], on),
                _words(expected, on), wrong, constants=self._constants, sums=self._sums,
            )  # fmt: skip
            rows.copy_(before)
            found: list[int] = wrong.cpu().tolist()
        return found == [page % 2 for page in range(count)]

    def fence_behind(self, *fences: Fence | None) -> Fence | None:
        """Return a point behind all checks so far and behind ``fences`` of other streams."""
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


def _words(numbers: Sequence[int], on: torch.device) -> torch.Tensor:
    """Return unsigned 64-bit numbers as int64 [n] on the device, bit for bit."""
    return torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64)).to(on)
