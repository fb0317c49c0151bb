"""A GPU kernel reads the pages out of pinned host memory itself (Strata section 4.2).

Thousands of threads each keep a few 16-byte reads in flight, so small pages cost no more than large ones, and
page-first becomes layer-first on the way. The kernel runs as few large programs, so that it leaves the rest of the GPU
to the model; loads, which requests wait for, get more of them than backups, which no request waits for.

Checksums are verified on the device, over the bytes that have arrived there, so no processor reads what the link
carries. A wrong row has been written when it is found: its page is refused before its layer is declared loaded. Rows of
lengths that the device cannot check (``can_check``) are verified in host memory, right before they are copied, and what
the driver would not pin is moved by another mover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.kernels.page_gather import MAX_PROGRAMS, copy_pages
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_checks import failed_rows
from services.worker.kv.movers.device_checks import DeviceChecks, can_check
from services.worker.kv.movers.piece_slots import PieceSlots
from services.worker.kv.movers.protocol import Fence, Known, MoverName, PageMover, Verdict, nothing_wrong
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import Bools, PageLayout, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from shared import logs
from shared.errors import TransportError

_log = logs.get_logger("worker")

LOAD_PROGRAMS = 2
"""Programs of 1,024 threads for loads, and half as many for backups: the default of Strata section 4.2."""

PIECE_BYTES = 32 * 2**20
"""Bytes of one layer in one launch: 0.6 ms of a link, twice what Python takes for a piece and its launches."""

LAUNCH_BYTES = 64 * 2**20
"""Bytes of several layers in one launch of a backup, which occupies its multiprocessors for a millisecond or two."""

MOST_PIECE_PAGES = 8192
"""Pages in one launch, which bounds the memory for their numbers and checksums where pages are tiny."""


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """Satisfies :class:`Verdict` for a load in several pieces, each a slice of its pages."""

    count: int
    pieces: list[tuple[slice, Verdict]]

    def wrong(self) -> Bools:
        found = np.zeros(self.count, dtype=bool)
        for piece, verdict in self.pieces:
            found[piece] |= verdict.wrong()
        return found


class GpuAssistedMover:
    """Satisfies :class:`~services.worker.kv.movers.protocol.PageMover` by a GPU kernel."""

    name: MoverName = "gpu_assisted"

    def __init__(
        self,
        pool: DevicePool,
        *,
        programs: int = LOAD_PROGRAMS,
        unpinned: PageMover | None = None,
        checks_on_device: bool = True,
    ) -> None:
        """Compile the kernels if ``pool`` is on a GPU; nothing else may use it meanwhile.

        A load runs ``programs`` programs of 1,024 threads, at most ``MAX_PROGRAMS``, and a store half as many.
        ``unpinned`` moves memory that the driver would not pin; without it such memory raises TransportError. Without
        ``checks_on_device``, and where the device cannot check rows of this length or gives wrong verdicts, rows are
        checked in host memory before they are copied.
        """
        assert 1 <= programs <= MAX_PROGRAMS
        self._memory = pool.memory()
        self._device = pool.device
        self._programs = programs
        self._unpinned = unpinned
        half = pool.geometry.half_bytes
        self.piece_pages = min(MOST_PIECE_PAGES, max(1, PIECE_BYTES // (2 * half)))
        self._slots = PieceSlots(self.piece_pages, pool.device)
        # Page numbers of the next piece arrive while this one is copied and the last one is checked.
        self._uploads, self._copies = side_stream(pool.device), side_stream(pool.device)
        self._checks: DeviceChecks | None = None
        if checks_on_device and can_check(half):
            self._checks = DeviceChecks(self._memory, _flat(self._memory), self.piece_pages)
        if pool.device.type == "cuda":
            self._warm_up(PageLayout.page_first(pool.geometry, 1))

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Verdict:
        """Launch the kernel that reads host memory, and checks of the arrived rows where they are wanted.

        Rows of lengths that the device cannot check are checked in host memory first. Raises TransportError for memory
        that is not pinned where there is no mover for it.
        """
        if self._cannot_reach(source):
            if self._unpinned is None:
                raise TransportError("a GPU cannot read host memory that is not pinned")
            return self._unpinned.load(source, layers, pages, device_pages, checks)
        if checks is None or not checks.wanted.any():
            self._copy(source, self._memory, layers, pages, device_pages, self._programs)
            return nothing_wrong(len(pages))
        if self._checks is None:
            wrong = failed_rows(source, layers, pages, checks)
            self._copy(source, self._memory, layers, pages[~wrong], device_pages[~wrong], self._programs)
            return Known(wrong)
        pieces: list[tuple[slice, Verdict]] = []
        for at, layer in enumerate(layers):
            for piece in self._pieces(len(pages), self.piece_pages):
                of_piece = checks.part(piece, slice(at, at + 1))
                verdict = self._copy_checked(self._checks, source, layer, pages[piece], device_pages[piece], of_piece)
                pieces.append((piece, verdict))
        return _Verdicts(len(pages), pieces)

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        """Have the kernel write host memory, with half of the programs of a load; waits for the end.

        Raises TransportError for memory that is not pinned where there is no mover for it.
        """
        if self._cannot_reach(target):
            if self._unpinned is None:
                raise TransportError("a GPU cannot write host memory that is not pinned")
            self._unpinned.store(target, layers, device_pages, pages)
            return
        self._copy(self._memory, target, layers, device_pages, pages, max(1, self._programs // 2))
        self._copies.drain()

    def fence(self) -> Fence | None:
        """Return one event behind all copies and checks launched so far, those of ``unpinned`` included."""
        others = [self._copies.fence(), None if self._unpinned is None else self._unpinned.fence()]
        if self._checks is not None:
            return self._checks.fence_behind(*others)
        self._copies.wait(others[1])
        return self._copies.fence()

    def drain(self) -> None:
        """Wait for all streams of this mover, those of ``unpinned`` included."""
        self._uploads.drain()
        self._copies.drain()
        if self._checks is not None:
            self._checks.drain()
        if self._unpinned is not None:
            self._unpinned.drain()

    def _cannot_reach(self, memory: PageMemory) -> bool:
        """Return whether a kernel on this device would fault on these bytes (the interpreter, for tests, reaches all).

        Also true where it would be compiled again for them: a neighbour's pool has strides of its own.
        """
        if self._device.type == "cpu":
            return False
        return memory.tensor is not None or not memory.is_pinned

    def _copy(
        self,
        source: PageMemory,
        target: PageMemory,
        layers: range,
        pages: PageNumbers,
        target_pages: PageNumbers,
        programs: int,
    ) -> None:
        most = max(1, LAUNCH_BYTES // (2 * self._memory.layout.half_bytes * len(layers)))
        for piece in self._pieces(len(pages), min(most, self.piece_pages)):
            slot = self._slots.next()
            sent = slot.fill(pages[piece], target_pages[piece], target_pages[:0], None)
            with self._uploads:
                slot.send()
            self._copies.wait(self._uploads.fence())
            with self._copies:
                _copy(source, target, sent.numbers, layers, programs)
            slot.use_until(self._copies.fence())

    def _copy_checked(
        self,
        device_checks: DeviceChecks,
        source: PageMemory,
        layer: int,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks,
    ) -> Verdict:
        slot = self._slots.next()
        wanted = np.flatnonzero(checks.wanted)
        sent = slot.fill(pages, device_pages, device_pages[wanted], checks.of(wanted))
        with self._uploads:
            slot.send()
        self._copies.wait(self._uploads.fence())
        with self._copies:
            _copy(source, self._memory, sent.numbers, range(layer, layer + 1), self._programs)
        copied = self._copies.fence()
        slot.use_until(copied)  # The copy reads the slot until then, even if the check cannot be launched.
        return device_checks.launch(slot, sent, layer, copied, len(pages), wanted)

    def _pieces(self, count: int, most: int) -> Iterator[slice]:
        for start in range(0, count, most):
            yield slice(start, min(start + most, count))

    def _warm_up(self, host: PageLayout) -> None:
        """Compile the kernels before the first load of a request, and try the checks on this device."""
        # The pool and the slots may be memory that other streams still work on.
        torch.cuda.synchronize(self._device)
        nothing = np.empty(0, dtype=np.int32)
        slot = self._slots.next()
        sent = slot.fill(nothing, nothing, nothing, None)
        memory, device = _flat(self._memory), self._memory.layout
        with self._copies:
            for begin, end in ((host, device), (device, host)):
                copy_pages(memory, begin, memory, end, sent.numbers, range(1), programs=1)
        if self._checks is not None and not self._checks.agree_with_xxhash():
            _log.warning("device_checks_refused", reason="they differ from xxhash's", instead="checked in host memory")
            self._checks = None
        torch.cuda.synchronize(self._device)


def _copy(source: PageMemory, target: PageMemory, numbers: torch.Tensor, layers: range, programs: int) -> None:
    copy_pages(_flat(source), source.layout, _flat(target), target.layout, numbers, layers, programs=programs)


def _flat(memory: PageMemory) -> torch.Tensor:
    """Return the memory as flat uint8. Pinned memory is aliased: its address is valid on the GPU too."""
    if memory.tensor is not None:
        return memory.tensor
    assert memory.array is not None
    return torch.from_numpy(memory.array)
