"""A prefix in pages of a device pool, as a source of keys, K and V."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.importance.prefix_source import token_slots
from services.worker.kv.device_pool import DevicePool


class PagedPrefix:
    """KV in pages of a device pool: here what is saved is attention, not I/O."""

    def __init__(self, pool: DevicePool, pages: npt.NDArray[np.int32], end: int, start: int = 0) -> None:
        """``pages`` is a page table, int32, that covers tokens up to ``end``; entries before ``start`` are not used."""
        self.start, self.end, self.tokens = start, end, end - start
        self.kv_heads = pool.geometry.kv_heads
        self.token_bytes = pool.geometry.token_bytes // pool.geometry.layers
        self._pool = pool
        self._slots = torch.from_numpy(token_slots(pages, pool.geometry.page_size, start, end)).to(pool.device)

    def keys(self, layer: int, heads: Sequence[int], start: int, end: int) -> torch.Tensor:
        slots = self._slots[start - self.start : end - self.start]
        rows = self._pool.k(layer).flatten(0, 1).index_select(0, slots)
        return rows[:, list(heads)].transpose(0, 1)

    def prefetch_keys(self, layer: int, heads: Sequence[int], start: int) -> None:
        """They are here."""

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        slots = self._slots[tokens - self.start]
        return self._pool.tensor[layer].flatten(1, 2).index_select(1, slots).transpose(1, 2)

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.kv_heads, device=tokens.device)[:, None]
        return self._pool.v(layer).flatten(0, 1)[self._slots[tokens - self.start], heads]
