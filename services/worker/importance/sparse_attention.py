"""Attention over chosen tokens of a prefix and all of the request's own, causal.

Prefix tokens keep their positions: stored keys carry their rotation already, and the sliding-window rule looks at the
true position. When all tokens are chosen the arithmetic is that of
:class:`~services.worker.engine.cpu_attention.CpuAttention`, block by block, so that the outcome is equal as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.worker.importance.identification import BLOCK_ROWS, Rows


@dataclass(frozen=True, slots=True)
class SelectedKv:
    """Chosen prefix tokens of one layer: key and value ``[kv_heads, k, head_dim]``.

    positions int64 ``[kv_heads, k]``, or ``[1, k]`` where all heads have the same; rows ascending.
    """

    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor


def attend_selected(
    rows: Rows, selected: SelectedKv, key: torch.Tensor, value: torch.Tensor, first: int
) -> torch.Tensor:
    """The attention output ``[T, heads, head_dim]``.

    key and value ``[kv_heads, n, head_dim]`` are those of the request's own tokens at positions ``first, first + 1
    ...``, up to the last row's or beyond; no row sees any beyond its own.
    """
    heads, count, head_dim = rows.query.shape
    kv_heads = key.shape[0]
    query = rows.query.view(kv_heads, heads // kv_heads, count, head_dim)
    output = query.new_empty(count, kv_heads, heads // kv_heads, head_dim)
    for start in range(0, count, BLOCK_ROWS):
        end = min(count, start + BLOCK_ROWS)
        own = rows.context + end - first
        keys = torch.cat([selected.key, key[:, :own]], dim=1)[:, None]
        values = torch.cat([selected.value, value[:, :own]], dim=1)[:, None]
        mask = _mask(rows, selected, start, end, first, own)
        block = query[:, :, start:end]
        output[start:end].copy_(_attend(block, keys, values, mask, rows).permute(2, 0, 1, 3))
    return output.view(count, heads, head_dim)


def _mask(rows: Rows, selected: SelectedKv, start: int, end: int, first: int, own: int) -> torch.Tensor | None:
    """What rows ``[start, end)`` see: bool ``[kv_heads or 1, 1, rows, k + own]``, or None if a single row sees all."""
    device = rows.query.device
    if end - start == 1 and rows.window is None:
        return None
    mine = torch.arange(first, first + own, device=device).expand(len(selected.positions), -1)
    positions = torch.cat([selected.positions, mine], dim=1)[:, None]
    at = torch.arange(rows.context + start, rows.context + end, device=device)[None, :, None]
    seen = positions <= at
    if rows.window is not None:
        seen &= positions > at - rows.window
    return seen[:, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rows: Rows
) -> torch.Tensor:
    """query ``[kv_heads, group, rows, head_dim]``; key and value ``[kv_heads, 1, keys, head_dim]``."""
    if rows.softcap is not None:
        scores = (query @ key.transpose(2, 3)) * (rows.scaling / rows.softcap)
        scores = scores.tanh() * rows.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
    group = query.shape[1]
    if mask is None:  # One row: the group goes as rows, so that one pass over the keys serves all of it.
        packed = query.transpose(1, 2)
        return scaled_dot_product_attention(packed, key, value, scale=rows.scaling).transpose(1, 2)
    wide_key, wide_value = key.expand(-1, group, -1, -1), value.expand(-1, group, -1, -1)
    return scaled_dot_product_attention(query, wide_key, wide_value, attn_mask=mask, scale=rows.scaling)
