"""Where the KV of a prefix is read from, layer by layer: keys of some heads, or K and V of some tokens.

Tokens are positions from the root of the request. Everything returned is head-first and, but for rounded keys, of the
model's data type. A source may be read by two threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class PrefixSource(Protocol):
    """Source of the KV of tokens ``[start, end)`` of a request.

    They are ``tokens`` in number, with ``kv_heads`` KV heads. The tensors are on the device where attention runs.
    ``token_bytes`` are those of K and V of one token in one layer.
    """

    start: int
    end: int
    tokens: int
    kv_heads: int
    token_bytes: int

    def probe_keys(self, layer: int, heads: Sequence[int], start: int, layers: int = 1) -> tuple[torch.Tensor, int]:
        """Return K of tokens from ``start`` to the end for choosing, ``[len(heads), n, head_dim]``, and its bytes.

        It may have been kept rounded (:mod:`key_codes`), and then is float32: nothing attends over it. What has to be
        read now is read for ``layers`` layers, which will ask for the same.
        """

    def keys(self, layer: int, start: int) -> torch.Tensor:
        """Return K of all heads, of tokens from ``start`` to the end, ``[kv_heads, n, head_dim]``."""

    def prefetch_keys(self, layer: int, layers: int, heads: Sequence[int], start: int) -> bool:
        """Begin to read what ``probe_keys`` will be asked for by ``layers`` layers from ``layer`` on.

        They ask for these heads, from ``start`` to the end. Which keys a layer reads does not depend on the layers
        before it. Return False where that was not begun because too much is being read already; ``probe_keys``
        raises the errors.
        """

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return K and V of all heads, ``[2, kv_heads, n, head_dim]``; tokens int64 ``[n]``, ascending, n may be 0."""

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return V of every head at tokens of its own, ``[kv_heads, n, head_dim]``.

        tokens is int64 ``[kv_heads, n]``, each row ascending; n may be 0.
        """


def token_slots(pages: npt.NDArray[np.int32], page_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
    """Pool slots, int64, of tokens ``[start, end)`` of the request with this page table."""
    tokens = np.arange(start, end, dtype=np.int64)
    return pages[tokens // page_size].astype(np.int64) * page_size + tokens % page_size
