"""Attention over chosen tokens of a prefix and all of what lies before and behind it, causal.

Tokens keep their positions: stored keys carry their rotation already, and the sliding-window rule looks at the
true position. When all tokens are chosen the arithmetic is that of
:class:`~services.worker.engine.cpu_attention.CpuAttention`, block by block, so that the outcome is equal as well.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engine.native_work import find_selected_work
from services.worker.importance.identification import Rows
from services.worker.native.extend import compile_extend

BLOCK_ROWS = 256
"""Query rows that attend at a time."""


def attend_selected(rows: Rows, kv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the attention output ``[T, heads, head_dim]``.

    kv ``[2, kv_heads, n, head_dim]`` of tokens at positions int64 ``[kv_heads, n]``, or ``[1, n]`` where all heads have
    the same; each row ascending. The last T of them are the rows themselves.
    """
    heads, count, head_dim = rows.query.shape
    kv_heads, tokens = kv.shape[1:3]
    if count > 1 and rows.softcap is None and kv.device.type == "cpu":
        extend = compile_extend(head_dim, heads // kv_heads, kv.dtype)
        if extend is not None:
            work = find_selected_work(positions.numpy(), rows.context, count, rows.window, heads // kv_heads, kv_heads)
            key, value = kv.transpose(1, 2)[:, None]
            attended = rows.query.new_empty(count, heads, head_dim)
            extend.attend(work, rows.query, key, value, attended, rows.scaling)
            return attended
    query = rows.query.view(kv_heads, heads // kv_heads, count, head_dim)
    output = query.new_empty(count, kv_heads, heads // kv_heads, head_dim)
    for start in range(0, count, BLOCK_ROWS):
        end = min(count, start + BLOCK_ROWS)
        seen = tokens - count + end  # What is behind the last row of the block is seen by none of it.
        key, value = kv[0, :, None, :seen], kv[1, :, None, :seen]
        mask = _mask(rows, positions[:, :seen], start, end)
        block = query[:, :, start:end]
        output[start:end].copy_(_attend(block, key, value, mask, rows).permute(2, 0, 1, 3))
    return output.view(count, heads, head_dim)


def _mask(rows: Rows, positions: torch.Tensor, start: int, end: int) -> torch.Tensor | None:
    """Return what rows ``[start, end)`` see: bool ``[kv_heads or 1, 1, rows, n]``, or None if a single row sees all."""
    if end - start == 1 and rows.window is None:
        return None
    at = torch.arange(rows.context + start, rows.context + end, device=positions.device)[None, :, None]
    seen = positions[:, None] <= at
    if rows.window is not None:
        seen &= positions[:, None] > at - rows.window
    return seen[:, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rows: Rows
) -> torch.Tensor:
    """Return ``[kv_heads, group, rows, head_dim]``, as query is; key and value: ``[kv_heads, 1, keys, head_dim]``."""
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
