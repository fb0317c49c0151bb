"""Copies of K and V from whole hidden pages into the parts of a group's pool.

Rank 0 makes them, as its other loads: a checksum covers all heads (ADR 0020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.worker.kv.device_pool import TORCH_DTYPES
from services.worker.kv.movers.protocol import Fence
from services.worker.kv.page_memory import PageNumbers
from services.worker.parallel.group_pool import PartOfPool
from services.worker.restore.hidden_page_source import HiddenPages, unit_memory

PIECE_BYTES = 4 * 2**20
"""Bytes of one unit that are staged at a time."""

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class KvOfParts:
    """A :class:`~services.worker.restore.kv_source.KvSource` over hidden pages."""

    def __init__(self, pages: HiddenPages, parts: Sequence[PartOfPool], device_pages: PageNumbers) -> None:
        """``parts`` are by heads; ``device_pages`` int32 [n], distinct and inside every part."""
        self._pages = pages
        self._parts = [(part.heads, part.pool) for part in parts if part.heads is not None]
        self._step = max(1, PIECE_BYTES // pages.geometry.unit_bytes)
        index = torch.from_numpy(device_pages.astype(np.int64))
        self._index = [index.to(pool.device) for _, pool in self._parts]

    def load(self, layer: int) -> None:
        """Copy a layer's K and V into every part. Raises PiecesRefused also where the pages lack the layer."""
        for half, unit in enumerate(self._pages.kv_units(layer)):
            for start in range(0, len(self._pages), self._step):
                self._spread(unit, layer, half, slice(start, min(start + self._step, len(self._pages))))

    def fence(self) -> Fence | None:
        """Return None: no fence covers these loads, and :meth:`drain` waits for them."""
        return None

    def drain(self) -> None:
        """Wait for the GPUs of all parts."""
        for _, pool in self._parts:
            if pool.device.type == "cuda":
                _cuda.synchronize(pool.device)

    def _spread(self, unit: int, layer: int, half: int, part: slice) -> None:
        geometry, count = self._pages.geometry, part.stop - part.start
        staged = np.empty((count, geometry.unit_bytes), dtype=np.uint8)
        target = unit_memory(staged.reshape(-1), count, geometry.unit_bytes, geometry.unit_bytes)
        self._pages.copy(unit, part, target, np.arange(count, dtype=np.int32))
        whole = torch.from_numpy(staged).view(TORCH_DTYPES[geometry.dtype])
        whole = whole.view(count, geometry.page_size, geometry.kv_heads, geometry.head_dim)
        for (heads, pool), index in zip(self._parts, self._index, strict=True):
            into = pool.v(layer) if half else pool.k(layer)
            into.index_copy_(0, index[part], whole[:, :, heads.start : heads.stop].to(pool.device))
