"""One copy for each page and half, as in serving systems that hand pages to the copy engine one by one.

Kept as the baseline that the others are measured against, and because it needs nothing but a copy. It checks rows in
host memory right before it copies them from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.protocol import Fence, Known, MoverName
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks


class PerPageMover:
    """Satisfies :class:`~services.worker.kv.movers.protocol.PageMover`."""

    name: MoverName = "per_page"
    piece_pages = 64

    def __init__(self, pool: DevicePool) -> None:
        """Copy into and out of ``pool``, on a stream of its own if that is on a GPU."""
        self._memory = pool.memory()
        self._stream = side_stream(pool.device)

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Known:
        """Check each row in host memory, then copy its two halves; wrong rows are not copied."""
        wrong = np.zeros(len(pages), dtype=bool)
        begin, end = _rows(source, self._memory), _rows(self._memory, source)
        numbers = list(zip(pages.tolist(), device_pages.tolist(), strict=True))
        with self._stream:
            for at, layer in enumerate(layers):
                for index, (page, device_page) in enumerate(numbers):
                    if checks is not None and not wrong[index]:
                        row = np.ascontiguousarray(source.host_rows()[page, layer]).reshape(-1)
                        wrong[index] = not checks.holds(row, index, at)
                    if not wrong[index]:
                        for half in (0, 1):
                            _copy(begin[page, layer, half], end[device_page, layer, half])
        return Known(wrong)

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        """Copy each half of each page by itself; waits for the end."""
        begin, end = _rows(self._memory, target), _rows(target, self._memory)
        numbers = list(zip(device_pages.tolist(), pages.tolist(), strict=True))
        with self._stream:
            for layer in layers:
                for device_page, page in numbers:
                    for half in (0, 1):
                        _copy(begin[device_page, layer, half], end[page, layer, half])
        self.drain()

    def fence(self) -> Fence | None:
        """Return an event behind the copies launched so far; None in host memory."""
        return self._stream.fence()

    def drain(self) -> None:
        """Wait for the mover's stream; in host memory there is nothing to wait for."""
        self._stream.drain()


def _rows(memory: PageMemory, other: PageMemory) -> Any:
    """Return ``[pages, layers, 2, half_bytes]`` as an array, or as a tensor where this or ``other`` is on a GPU."""
    if memory.tensor is not None:
        return memory.device_bytes()
    rows = memory.host_rows()
    if other.tensor is None:
        return rows
    return torch.from_numpy(rows)


def _copy(begin: Any, end: Any) -> None:
    """Copy one row. Unpinned memory has been copied when the call returns, even if the copy is asynchronous."""
    if isinstance(end, np.ndarray):
        end[...] = begin
    else:
        end.copy_(begin, non_blocking=True)
