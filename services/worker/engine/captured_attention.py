"""The interface by which a captured step attends: what its graph repeats, and what the host does before each replay.

Without an implementation of it, graphs attend by the kernels of :mod:`~services.worker.engine.static_batch`, whose
inputs are all in the static batch. FlashInfer (:mod:`~services.worker.engine.flashinfer_graphs`) plans every step on
the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.forward_meta import Segment
from services.worker.engine.shared_prefixes import SharedTiles


class PagedAttend(Protocol):
    """Attention over the paged K and V of one layer."""

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
    ) -> torch.Tensor:
        """Return the attention of q over K and V [pages, page_size, kv_heads, head_dim]: [T, heads, head_dim]."""


class CapturedAttention(Protocol):
    """Attention of all graphs of one runner."""

    def shapes(self, most_rows: int, longest: int) -> list[DecodeShape]:
        """Return the shapes to capture, the largest first.

        Steps have up to ``most_rows`` requests of up to ``longest`` tokens.
        """

    def of_shape(self, shape: DecodeShape) -> PagedAttend:
        """Return the function that a graph of this shape calls in each layer.

        Its first call for each kind of layer must come before the capture.
        """

    def plan(self, segments: Sequence[Segment], tiles: SharedTiles | None, shape: DecodeShape) -> None:
        """Plan the next replay of a graph of ``shape`` for ``segments``, with padding behind them.

        ``tiles`` are the keys that they share, for a shape that ``shares``.
        """
