"""The seam behind which a captured step attends: what a graph repeats, and what is done on the host before it does.

Without one, graphs attend by the kernels of :mod:`~services.worker.engine.static_batch`, whose inputs are all in the
static batch. FlashInfer (:mod:`~services.worker.engine.flashinfer_graphs`) plans every step on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.forward_meta import Segment
from services.worker.engine.shared_prefixes import SharedTiles


class PagedAttend(Protocol):
    """Attention over one layer's K and V, ``[pages, page_size, kv_heads, head_dim]``; of q's shape, ``[T, heads,
    head_dim]``.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        /,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class CapturedAttention(Protocol):
    """Attention of the graphs of one runner."""

    def shapes(self, most_rows: int, longest: int) -> list[DecodeShape]:
        """Return what is captured for steps of up to ``most_rows`` requests of up to ``longest`` tokens, the largest
        first.
        """

    def of_shape(self, shape: DecodeShape) -> PagedAttend:
        """Return what a graph of this shape calls in each layer. Its first call for a kind of layer is not captured."""

    def plan(self, segments: Sequence[Segment], tiles: SharedTiles | None, shape: DecodeShape) -> None:
        """Plan a graph of ``shape`` for ``segments``, and padding behind them. ``tiles`` are the keys that they
        share, for a shape that ``shares``.
        """
