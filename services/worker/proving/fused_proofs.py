"""Proof of the kernels that replace several of PyTorch's operators each in a fused forward."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from services.worker.kv.device_pool import TORCH_DTYPES
from services.worker.kv.float8 import to_float8
from services.worker.proving.cases import compare, compare_bytes, speed_of
from services.worker.proving.part import WayAbsent
from services.worker.proving.table import ServedShape, Speed

ROWS = 19
EPS = 1e-6
SPEED_ROWS = 2048


def prove_fused(shape: ServedShape) -> Speed | None:
    """Prove sum and norm, rotation and write, activation and product, against the same in float64.

    The speed is that of sum and norm, in bytes read and written. Raises WayAbsent where layers are not alike,
    WrongResult.
    """
    if not shape.is_uniform:
        raise WayAbsent("the fused forward is for models whose layers all keep K and V of the same heads")
    kernels: Any = importlib.import_module("services.worker.kernels")
    _prove_norm(kernels, shape)
    _prove_activation(kernels, shape)
    for has_norms, is_written in ((False, True), (True, True), (False, False)):
        _prove_rotation(kernels, shape, has_norms=has_norms, is_written=is_written)
    return _speed(kernels, shape)


def _random(shape: ServedShape, *sizes: int, seed: int) -> torch.Tensor:
    """Return normal numbers on the device, in the model's type."""
    numbers = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))
    return numbers.to(TORCH_DTYPES[shape.computed_dtype]).to(shape.device)


def _width(shape: ServedShape) -> int:
    return shape.query_heads * shape.geometry.head_dim


def _normed(numbers: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return numbers * (numbers.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _prove_norm(kernels: Any, shape: ServedShape) -> None:
    x, delta = (_random(shape, ROWS, _width(shape), seed=seed) for seed in (1, 2))
    weight, out = _random(shape, _width(shape), seed=3), torch.empty_like(x)
    # The sum is rounded before it is normed, as modules do that add first.
    total = (x.cpu() + delta.cpu()).double()
    kernels.add_rms_norm(x, delta, weight, EPS, out)
    compare(x, total, "the sum of hidden states")
    compare(out, _normed(total, weight.cpu().double()), "normed hidden states")
    kernels.add_rms_norm(x, None, weight, EPS, out)
    compare(out, _normed(total, weight.cpu().double()), "normed hidden states without a sum")


def _prove_activation(kernels: Any, shape: ServedShape) -> None:
    both = _random(shape, ROWS, 2 * _width(shape), seed=4)
    gate, up = both.cpu().double().chunk(2, dim=-1)
    compare(kernels.silu_mul(both), torch.nn.functional.silu(gate) * up, "activated products")


def _prove_rotation(kernels: Any, shape: ServedShape, *, has_norms: bool, is_written: bool) -> None:
    geometry, heads = shape.geometry, (shape.query_heads, shape.geometry.kv_heads)
    half, page_size = geometry.head_dim // 2, geometry.page_size
    qkv = _random(shape, ROWS, (heads[0] + 2 * heads[1]) * 2 * half, seed=5)
    angles = torch.arange(64)[:, None] * torch.linspace(1.0, 0.01, half)[None, :]
    cos, sin = (each.to(qkv.dtype).to(qkv.device) for each in (angles.cos(), angles.sin()))
    random = torch.Generator().manual_seed(6)
    positions = torch.randint(64, (ROWS,), generator=random)
    pages = 2 * (ROWS // page_size + 1)
    k_pool, v_pool = (_random(shape, pages, page_size, heads[1], 2 * half, seed=seed) for seed in (7, 8))
    if geometry.is_rounded:
        k_pool, v_pool = to_float8(k_pool), to_float8(v_pool)
    slots = torch.randperm(pages * page_size, generator=random)[:ROWS]
    slots[4] = -1
    weights = [_random(shape, 2 * half, seed=seed) for seed in (9, 10)] if has_norms else []
    q, k, v = torch.split(qkv.cpu().double().view(ROWS, -1, 2 * half), [heads[0], heads[1], heads[1]], dim=1)
    if weights:
        # Normed numbers are rounded before they are rotated.
        q, k = (_normed(each, weight.cpu().double()) for each, weight in zip((q, k), weights, strict=True))
    of_rows = [each.cpu().double()[positions][:, None] for each in (cos, sin)]
    q, k = (_rotated(each, *of_rows) for each in (q, k))
    before = k_pool.cpu().clone(), v_pool.cpu().clone()
    kernels.rope_write(
        qkv,
        positions.to(qkv.device),
        cos,
        sin,
        (k_pool, v_pool, slots.to(qkv.device)) if is_written else None,
        heads=heads,
        norms=(weights[0], weights[1], EPS) if weights else None,
    )
    found = qkv.view(ROWS, -1, 2 * half)
    compare(found[:, : heads[0]], q, "rotated queries")
    compare(found[:, heads[0] : heads[0] + heads[1]], k, "rotated keys")
    compare_bytes(found[:, heads[0] + heads[1] :].contiguous(), v.to(qkv.dtype), "values")
    written = slots >= 0
    for pool, old, at in ((k_pool, before[0], heads[0]), (v_pool, before[1], heads[0] + heads[1])):
        if is_written:
            new = found[:, at : at + heads[1]].cpu()[written]
            old.flatten(0, 1)[slots[written]] = to_float8(new) if geometry.is_rounded else new
        compare_bytes(pool, old, "K and V in their slots")


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _speed(kernels: Any, shape: ServedShape) -> Speed | None:
    x = torch.zeros((SPEED_ROWS, _width(shape)), dtype=TORCH_DTYPES[shape.computed_dtype], device=shape.device)
    delta, out, weight = torch.zeros_like(x), torch.empty_like(x), x[0].clone()
    return speed_of(lambda: kernels.add_rms_norm(x, delta, weight, EPS, out), 4 * x.nbytes, shape.device)
