"""Sparse attention as its definition says, in double precision: what :mod:`sparse_attention` is tested against."""

from __future__ import annotations

import math

import torch

from services.worker.importance.identification import Rows


def attend_masked(rows: Rows, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``[T, heads, head_dim]``, float64: full attention with the scores of what is not chosen at minus infinity.

    key and value ``[kv_heads, length, head_dim]`` are those of all tokens from position 0; chosen bool ``[kv_heads,
    length]`` is true for all of the request's own tokens.
    """
    heads, count, head_dim = rows.query.shape
    group = heads // key.shape[0]
    output = torch.empty(count, heads, head_dim, dtype=torch.float64)
    for head in range(heads):
        keys, values, may = key[head // group].double(), value[head // group].double(), chosen[head // group]
        for row in range(count):
            position = rows.context + row
            scores = keys @ rows.query[head, row].double() * rows.scaling
            if rows.softcap is not None:
                scores = rows.softcap * torch.tanh(scores / rows.softcap)
            for token in range(len(scores)):
                behind = rows.window is not None and token <= position - rows.window
                if not may[token] or token > position or behind:
                    scores[token] = -math.inf
            output[row, head] = torch.softmax(scores, dim=0) @ values
    return output
