"""Small arrays of one piece, sent to the GPU and back: page numbers, seeds and checksums there, failures back.

They travel by way of pinned memory, and no request waits for them. A slot is written again only when an event says that
its last copies have ended, and the answers that came back in it have been read by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.kv.movers.protocol import Fence
from services.worker.kv.page_memory import Bools, PageNumbers
from services.worker.kv.row_checks import RowChecks

SLOTS = 4
"""Pieces under way: one is copied, one is checked, one waits for the copy's end, and one is being launched."""

PAGE_BYTES = 8 + 8 + 4 + 4 + 4
"""Bytes of one page in a slot: seed, checksum, the device page that is checked, and the numbers of a copy."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Contents of a slot, on the device: int32 ``numbers`` [2, pages] (from, to).

    For the pages that are checked, int64 ``seeds`` and ``expected`` and int32 ``checked`` [wanted]; ``wrong`` uint8
    [wanted] is for the answer.
    """

    numbers: torch.Tensor
    seeds: torch.Tensor
    expected: torch.Tensor
    checked: torch.Tensor
    wrong: torch.Tensor


class PieceVerdict:
    """Satisfies :class:`~services.worker.kv.movers.protocol.Verdict` for a piece that is checked on the device."""

    def __init__(self, slot: PieceSlot, count: int, wanted: np.ndarray) -> None:
        """Prepare; ``wanted`` are the entries that are checked, of ``count``."""
        self._slot: PieceSlot | None = slot
        self._wanted = wanted
        self._wrong = np.zeros(count, dtype=bool)

    def wrong(self) -> Bools:
        """Return the failed pages, bool [pages]; waits for the slot's answers, and raises what the device raises."""
        if self._slot is not None:
            self._slot.settle()
        return self._wrong

    def take(self, answers: np.ndarray) -> None:
        """Take the device's answers, uint8 [wanted], 0 for a row that is right."""
        self._wrong[self._wanted] = answers != 0
        self._slot = None


class PieceSlot:
    """Room for one piece at a time, in one layer; used by one thread."""

    def __init__(self, pages: int, device: torch.device) -> None:
        """Allocate room for ``pages`` pages on ``device`` and in host memory, pinned if ``device`` is a GPU."""
        is_pinned = device.type == "cuda"
        self._host = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self._device = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=device)
        self._answers = torch.empty(pages, dtype=torch.uint8, pin_memory=is_pinned)
        self._wrong = torch.empty(pages, dtype=torch.uint8, device=device)
        self._filled = 0
        self._until: Fence | None = None
        self._verdict: tuple[PieceVerdict, int] | None = None

    def fill(
        self, pages: PageNumbers, target_pages: PageNumbers, checked: PageNumbers, checks: RowChecks | None
    ) -> Sent:
        """Write a piece: copy ``pages`` to ``target_pages`` (int32 [n]) and check ``checked`` (int32 [wanted]).

        ``checks`` of one layer are for the checked pages alone; without ``checks`` none is checked.
        """
        assert self._until is None
        count, wanted = len(pages), len(checked)
        self._filled = 20 * wanted + 8 * count
        assert self._filled <= len(self._host)
        seeds, expected = slice(0, 8 * wanted), slice(8 * wanted, 16 * wanted)
        places = slice(16 * wanted, 20 * wanted)
        numbers = slice(places.stop, self._filled)
        held = self._host.numpy()
        if checks is not None:
            held[seeds].view(np.uint64)[:] = checks.seeds()
            held[expected].view(np.uint64)[:] = checks.expected[:, 0]
            held[places].view(np.int32)[:] = checked
        held[numbers].view(np.int32).reshape(2, count)[:] = (pages, target_pages)
        # A page without an answer is wrong.
        self._answers[:wanted] = 1
        there = self._device
        return Sent(
            there[numbers].view(torch.int32).view(2, count),
            there[seeds].view(torch.int64),
            there[expected].view(torch.int64),
            there[places].view(torch.int32),
            self._wrong[:wanted],
        )

    def send(self) -> None:
        """Copy the filled arrays to the device, on the current stream."""
        self._device[: self._filled].copy_(self._host[: self._filled], non_blocking=True)

    def fetch(self, count: int) -> None:
        """Copy the device's answers on ``count`` pages back, on the current stream."""
        self._answers[:count].copy_(self._wrong[:count], non_blocking=True)

    def use_until(self, fence: Fence | None, verdict: tuple[PieceVerdict, int] | None = None) -> None:
        """Hold the slot until ``fence`` has passed; then ``verdict`` takes its answers (and their count)."""
        self._until, self._verdict = fence, verdict

    def settle(self) -> None:
        """Wait until the slot is free. Raises what the device raises; the slot is not free then."""
        if self._until is not None:
            self._until.synchronize()
            self._until = None
        if self._verdict is not None:
            verdict, count = self._verdict
            self._verdict = None
            verdict.take(self._answers[:count].numpy())


class PieceSlots:
    """Slots that are used in turn."""

    def __init__(self, pages: int, device: torch.device) -> None:
        """Allocate ``SLOTS`` slots, each for pieces of up to ``pages`` pages."""
        self._slots = [PieceSlot(pages, device) for _ in range(SLOTS)]
        self._turn = 0

    def next(self) -> PieceSlot:
        """Return a free slot; wait for the one that has been in use longest."""
        self._turn = (self._turn + 1) % SLOTS
        slot = self._slots[self._turn]
        slot.settle()
        return slot


def numbers_on(pages: PageNumbers, device: torch.device) -> torch.Tensor:
    """Return page numbers as int64 on ``device``, for torch's indexing.

    On a GPU on the current stream, without waiting. The allocator of pinned memory reuses a block only when the copies
    out of it have ended.
    """
    numbers = torch.from_numpy(pages.astype(np.int64))
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
