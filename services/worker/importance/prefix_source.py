"""Where the KV of a prefix is read from, layer by layer: keys of some heads, or K and V of some tokens.

Tokens are positions from the root of the request. Everything returned is head-first and of the model's data type. A
source may be read by two threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool


class LayerKeys(Protocol):
    """Keys of whole heads, for finding what is important."""

    def keys(self, layer: int, heads: Sequence[int], start: int, end: int) -> torch.Tensor:
        """K of tokens ``[start, end)``, ``[len(heads), end - start, head_dim]``."""

    def prefetch_keys(self, layer: int, heads: Sequence[int], start: int) -> None:
        """Keys of these heads from ``start`` to the end will be asked for next: which keys a layer reads does not
        depend on the layers before it. Where reading takes time it begins now; an error of it is raised by ``keys``.
        """


class LayerKv(Protocol):
    """K and V of chosen tokens."""

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """K and V of all heads, ``[2, kv_heads, n, head_dim]``; tokens int64 ``[n]``, ascending, n may be 0."""

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """V of every head at tokens of its own, ``[kv_heads, n, head_dim]``; tokens int64 ``[kv_heads, n]``, each row
        ascending, n may be 0.
        """


class PrefixSource(LayerKeys, LayerKv, Protocol):
    """Tokens ``[start, end)`` of a request, ``tokens`` in number, with ``kv_heads`` KV heads, on the device where
    attention runs.

    ``token_bytes`` are those of K and V of one token in one layer.
    """

    start: int
    end: int
    tokens: int
    kv_heads: int
    token_bytes: int


class StoredPrefix:
    """KV held token by token outside of any pool, with the probe heads' keys stored a second time, apart from the rest,
    so that reading them touches nothing else (IMPRESS 6.5).
    """

    def __init__(self, kv: torch.Tensor, probe_heads: Sequence[int], start: int = 0) -> None:
        """kv ``[layers, 2, tokens, kv_heads, head_dim]``, of tokens from ``start`` on, is referred to, not copied."""
        self.start, self.end, self.tokens = start, start + kv.shape[2], kv.shape[2]
        self.kv_heads = kv.shape[3]
        self.token_bytes = 2 * kv.shape[3] * kv.shape[4] * kv.element_size()
        self._kv = kv
        self._apart = {head: kv[:, 0, :, head].contiguous() for head in probe_heads}

    def keys(self, layer: int, heads: Sequence[int], start: int, end: int) -> torch.Tensor:
        rows = slice(start - self.start, end - self.start)

        def of(head: int) -> torch.Tensor:
            apart = self._apart.get(head)
            return self._kv[layer, 0, rows, head] if apart is None else apart[layer, rows]

        return torch.stack([of(head) for head in heads])

    def prefetch_keys(self, layer: int, heads: Sequence[int], start: int) -> None:
        """They are here."""

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        return self._kv[layer].index_select(1, tokens - self.start).transpose(1, 2)

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.kv_heads, device=tokens.device)[:, None]
        return self._kv[layer, 1][tokens - self.start, heads]


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


def token_slots(pages: npt.NDArray[np.int32], page_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
    """Pool slots, int64, of tokens ``[start, end)`` of the request with this page table."""
    tokens = np.arange(start, end, dtype=np.int64)
    return pages[tokens // page_size].astype(np.int64) * page_size + tokens % page_size
