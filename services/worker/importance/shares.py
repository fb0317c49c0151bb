"""How much of each chunk of a prefix mattered: what IMPRESS (4.4.2) calls a chunk's importance ratio. Pure."""

from __future__ import annotations

from collections.abc import Collection

import torch

FULL_SHARE = 255
"""The share, one byte, of a chunk whose tokens were all chosen."""


def chunk_shares(positions: Collection[torch.Tensor], start: int, end: int, depth: int, chunk: int) -> bytes:
    """Return a byte for each chunk of ``chunk`` tokens in ``[depth, end)``: the share of its tokens that was chosen.

    The share is that of its tokens in ``[start, end)``, on average over layers and heads, in 255ths, rounded to the
    nearest. positions has int64 ``[kv_heads, k]`` or ``[1, k]`` for each layer: what it chose.
    """
    count = (end - depth) // chunk
    chosen = torch.zeros(count, dtype=torch.float64)
    for layer in positions:
        found = torch.bincount((layer.flatten().cpu() - depth) // chunk, minlength=count)
        chosen += found / (layer.shape[0] * len(positions))
    tokens = torch.full((count,), float(chunk), dtype=torch.float64)
    tokens[0] -= start - depth
    return bytes((chosen / tokens * FULL_SHARE).round().to(torch.int64).tolist())
