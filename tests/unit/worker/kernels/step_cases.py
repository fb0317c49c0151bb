"""Cases of the kernels between two attentions, computed by a kernel and by its oracle; called in the interpreter.

Each gives what the kernel and the oracle made, as fp32 on the way back: numpy has no bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.worker.kv.float8 import to_float8
from tests.unit.worker.kernels import oracles

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a tensor to what the kernel left in it, and what the oracle did."""


def add_rms_norm(rows: int, width: int, dtype: str, has_delta: bool) -> Pairs:
    """Both the sum, which replaces x, and its norm."""
    kernels, (x, delta, weight) = _kernels(), _random(dtype, (rows, width), (rows, width), (width,))
    left = []
    for module in (kernels, oracles):
        mine, out = x.clone(), torch.full_like(x, float("nan"))
        module.add_rms_norm(mine, delta if has_delta else None, weight, 1e-5, out)
        left.append((mine, out))
    return _pairs(("x", "out"), *left)


def silu_mul(rows: int, width: int, dtype: str) -> Pairs:
    """Gates from far below zero to far above."""
    (gate_up,) = _random(dtype, (rows, 2 * width))
    gate_up *= 20
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    return _pairs(("out",), (_kernels().silu_mul(gate_up),), (oracles.silu_mul(gate_up),))


def rope_write(heads: tuple[int, int], head_dim: int, dtype: str, has_norms: bool, writes: bool) -> Pairs:
    """Rows at the first and the last position, in the first and the last slot, and one of padding."""
    query_heads, kv_heads = heads
    pages, page_size, context = 3, 4, 50
    positions = torch.tensor([0, context - 1, 7, 7, 13])
    slots = torch.tensor([pages * page_size - 1, 0, 5, -1, 6])
    pool = (pages, page_size, kv_heads, head_dim)
    qkv, k_pool, v_pool, angles, q_weight, k_weight = _random(
        dtype, (len(slots), (query_heads + 2 * kv_heads) * head_dim), pool, pool, (context, head_dim // 2),
        (head_dim,), (head_dim,),
    )  # fmt: skip
    cosines, sines = angles.float().cos().to(angles.dtype), angles.float().sin().to(angles.dtype)
    left = []
    for module in (_kernels(), oracles):
        mine = [each.clone() for each in (qkv, k_pool, v_pool)]
        module.rope_write(
            mine[0], positions, cosines, sines, (mine[1], mine[2], slots) if writes else None,
            heads=heads, norms=(q_weight, k_weight, 1e-6) if has_norms else None,
        )  # fmt: skip
        left.append(tuple(mine))
    names = ("qkv", "k_pool", "v_pool")
    return _pairs(names, *left) | {"k_before": (k_pool.float().numpy(), k_pool.float().numpy())}


def rope_write_rounded(heads: tuple[int, int], head_dim: int, dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """What pools of eight bits have after the write, and what torch keeps of the step's own rotated rows."""
    query_heads, kv_heads = heads
    slots = torch.tensor([11, 0, 5, -1, 6])
    qkv, angles = _random(dtype, (len(slots), (query_heads + 2 * kv_heads) * head_dim), (50, head_dim // 2))
    cosines, sines = angles.float().cos().to(angles.dtype), angles.float().sin().to(angles.dtype)
    pools = [to_float8(torch.full((3, 4, kv_heads, head_dim), 7.0)) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    _kernels().rope_write(
        qkv, torch.tensor([0, 49, 7, 7, 13]), cosines, sines, (*pools, slots), heads=heads, norms=None
    )  # fmt: skip
    rows = torch.split(qkv.view(len(slots), -1, head_dim)[:, query_heads:], kv_heads, dim=1)
    for pool, mine in zip(expected, rows, strict=True):
        pool.flatten(0, 1)[slots[slots >= 0]] = to_float8(mine)[slots >= 0]
    return [(found.numpy(), pool.numpy()) for found, pool in zip(pools, expected, strict=True)]


def _kernels() -> Any:
    from services.worker import kernels

    return kernels


def _random(dtype: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=random).to(getattr(torch, dtype)) for shape in shapes]


def _pairs(names: tuple[str, ...], ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> Pairs:
    return {
        name: (one.float().numpy(), other.float().numpy())
        for name, one, other in zip(names, ours, theirs, strict=True)
    }  # fmt: skip
