"""Attention over the paged pool in plain torch operations, on any device: the fallback where no kernel serves.

A request's pages are gathered and scores are computed whole, in float32, some query rows at a time. It needs no
compiler, and takes several times the memory traffic of the KV: correct, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.visibility import first_visible
from services.worker.kv.float8 import from_float8

if TYPE_CHECKING:  # It pulls in Transformers, which proofs of this module do not wait for.
    from services.worker.engine.attention import AttentionCall
    from services.worker.kv.device_pool import DevicePool

MOST_SCORES = 2**25
"""Scores in memory at once, in all heads: 128 MiB of float32; softmax takes some more."""


class TorchAttention:
    """The backend of :class:`~services.worker.engine.paged_step.PagedStep` by torch's own operations."""

    def __init__(self, pool: DevicePool) -> None:
        """Attend over ``pool``, which may be on any device and is not closed here."""
        self._pool = pool

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        """Return the attention of one step; its page numbers are sent to the device once for all layers."""
        tables = page_tables(meta.segments, meta.page_size, self._pool.device)

        def attend(call: AttentionCall) -> torch.Tensor:
            return torch_attention(
                call.query[0].transpose(0, 1),
                self._pool.k(call.layer),
                self._pool.v(call.layer),
                meta.segments,
                tables,
                **call.scoring,
            )

        return attend


def page_tables(segments: tuple[Segment, ...], page_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the page numbers of each segment, int64 on ``device``; one copy for all of them."""
    counts = [pages_for(segment.length, page_size) for segment in segments]
    pages = np.concatenate([segment.pages[:count] for segment, count in zip(segments, counts, strict=True)])
    return torch.split(torch.from_numpy(pages.astype(np.int64)).to(device), counts)


def torch_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    segments: tuple[Segment, ...],
    tables: tuple[torch.Tensor, ...],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output ``[T, heads, head_dim]`` of q's dtype, contiguous.

    Arguments are those of ``services.worker.kernels.paged_attention``. Pools of bytes hold rounded K and V. ``tables``
    are the result of :func:`page_tables` for ``segments``. Nothing here waits for the device.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    first = 0
    for segment, pages in zip(segments, tables, strict=True):
        rows = slice(first, first + segment.rows)
        _attend_segment(
            q[rows], k_pool, v_pool, pages, segment.context, out[rows],
            scaling=scaling, window=window, softcap=softcap, chunk=chunk, sinks=sinks,
        )  # fmt: skip
        first = rows.stop
    return out


def _attend_segment(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    context: int,
    into: torch.Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Write the attention of one request's rows, at positions from ``context`` on, over its ``pages``, to ``into``."""
    page_size, kv_heads = k_pool.shape[1:3]
    rows, heads, head_dim = query.shape
    skipped = first_visible(context, window, chunk) // page_size
    base, length = skipped * page_size, context + rows
    # [kv_heads, keys, head_dim]; slots behind the last token hold nothing and are cut off.
    key, value = (
        _wide(pool.index_select(0, pages[skipped:]).flatten(0, 1)[: length - base], head_dim).transpose(0, 1)
        for pool in (k_pool, v_pool)
    )
    for start, end in _blocks(rows, heads * (length - base)):
        low = max(base, first_visible(context + start, window, chunk)) - base
        high = context + end - base
        # The query heads of a KV head are adjacent: [kv_heads, group * rows, head_dim].
        block = query[start:end].float().view(end - start, kv_heads, -1, head_dim)
        packed = block.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        scores = (packed @ key[:, low:high].transpose(1, 2)) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at, keys = range(context + start, context + end), range(base + low, base + high)
        hidden = _hidden(at, keys, window, chunk, query.device)
        scores = scores.view(kv_heads, -1, end - start, high - low).masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, end - start, -1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : high - low]
        result = weights.reshape(kv_heads, -1, high - low) @ value[:, low:high]
        into[start:end] = result.view(kv_heads, -1, end - start, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def _wide(slots: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the values in slots of a pool, as float32 [slots, kv_heads, head_dim]."""
    return from_float8(slots, head_dim, torch.float32) if slots.dtype == torch.uint8 else slots.float()


def _hidden(positions: range, keys: range, window: int | None, chunk: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys a row may not see, bool [rows, keys]."""
    row = torch.arange(positions.start, positions.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    if chunk is not None:
        return (key > row) | (key < row - row % chunk)
    return key > row if window is None else (key > row) | (key <= row - window)


def _blocks(rows: int, scores_of_row: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows whose scores are computed at once."""
    step = max(1, MOST_SCORES // scores_of_row)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
