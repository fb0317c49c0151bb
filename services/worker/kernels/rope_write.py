"""Rotate a step's queries and keys, and write its keys and values to their slots of the pool, in one launch.

For models that norm queries and keys by head (Qwen 3), that is done in the same launch.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.kernels.block_sizes import next_power_of_two
from services.worker.kernels.float8 import codes_of, kept_width, scale_of, store_scale
from shared.errors import InvariantViolated


@triton.jit
def normed_halves(low, high, weight, dims, in_half, eps, HALF: tl.constexpr):
    """Return the RMSNorm of heads in halves ``low`` and ``high``, fp32 [M, BLOCK_HALF], rounded as in the models."""
    dtype = weight.dtype.element_ty
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
    low_factor = tl.load(weight + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    high_factor = tl.load(weight + HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    low = (low_factor * (low * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    high = (high_factor * (high * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def rotated(one, other, cos, sin, dtype: tl.constexpr):
    """Return ``one * cos + other * sin``, each product and the sum rounded to ``dtype``."""
    return ((one * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def write_halves(pool, into, low, high, is_written, is_kept, dims, HALF: tl.constexpr):
    """Write a head [1, N] in two halves to ``into`` [1, N] of a pool; masked values are zero or not written."""
    if pool.dtype.element_ty == tl.uint8:
        low, high = tl.where(is_written, low.to(tl.float32), 0.0), tl.where(is_written, high.to(tl.float32), 0.0)
        one, low_is_finite = scale_of(low)
        other, high_is_finite = scale_of(high)
        exponent, is_finite = tl.maximum(one, other), low_is_finite & high_is_finite
        tl.store(pool + into, codes_of(low, exponent, is_finite), mask=is_written)
        tl.store(pool + into + HALF, codes_of(high, exponent, is_finite), mask=is_written)
        # The first of each row's pointers, without its column.
        first = tl.sum(tl.where(dims == 0, into, 0), 1)[:, None]
        store_scale(pool + first, exponent, is_finite, is_kept, 2 * HALF)
    else:
        tl.store(pool + into, low, mask=is_written)
        tl.store(pool + into + HALF, high, mask=is_written)


# The addresses of a step's tables vary: nothing may be compiled again for that.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_write_kernel(
    qkv,
    k_pool,
    v_pool,
    slots,
    positions,
    cosines,
    sines,
    q_weight,
    k_weight,
    eps,
    kv_heads,
    stride_row,
    stride_slot,
    stride_pool_head,
    HAS_NORM: tl.constexpr,
    WRITES: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate and write a KV head and the query heads that share it; grid (rows, kv_heads)."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HALF
    dtype: tl.constexpr = qkv.dtype.element_ty
    position = tl.load(positions + row)
    cos = tl.load(cosines + position * HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + position * HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]

    members = tl.arange(0, BLOCK_G)[:, None]
    is_query = (members < GROUP) & in_half[None, :]
    q_at = qkv + row * stride_row + (kv_head * GROUP + members) * (2 * HALF) + dims[None, :]
    low = tl.load(q_at, mask=is_query, other=0.0).to(tl.float32)
    high = tl.load(q_at + HALF, mask=is_query, other=0.0).to(tl.float32)
    if HAS_NORM:
        low, high = normed_halves(low, high, q_weight, dims, in_half, eps, HALF)
    tl.store(q_at, rotated(low, -high, cos, sin, dtype), mask=is_query)
    tl.store(q_at + HALF, rotated(high, low, cos, sin, dtype), mask=is_query)

    # One row of a tile: Triton reduces along its second dimension, as for the queries.
    one = tl.arange(0, 1)[:, None]
    is_key = (one < 1) & in_half[None, :]
    k_at = qkv + row * stride_row + (kv_heads * GROUP + kv_head + one) * (2 * HALF) + dims[None, :]
    low = tl.load(k_at, mask=is_key, other=0.0).to(tl.float32)
    high = tl.load(k_at + HALF, mask=is_key, other=0.0).to(tl.float32)
    if HAS_NORM:
        low, high = normed_halves(low, high, k_weight, dims, in_half, eps, HALF)
    key_low, key_high = rotated(low, -high, cos, sin, dtype), rotated(high, low, cos, sin, dtype)
    tl.store(k_at, key_low, mask=is_key)
    tl.store(k_at + HALF, key_high, mask=is_key)
    if WRITES:
        slot = tl.load(slots + row)
        is_written = is_key & (slot >= 0)
        into = slot * stride_slot + kv_head * stride_pool_head + one + dims[None, :]
        v_at = k_at + kv_heads * (2 * HALF)
        low, high = tl.load(v_at, mask=is_written, other=0.0), tl.load(v_at + HALF, mask=is_written, other=0.0)
        is_kept = (one < 1) & (slot >= 0)
        write_halves(k_pool, into, key_low, key_high, is_written, is_kept, dims[None, :], HALF)
        write_halves(v_pool, into, low, high, is_written, is_kept, dims[None, :], HALF)


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> None:
    """Rotate queries and keys in ``qkv`` in place by the angles of ``positions``.

    ``qkv`` is [T, (query_heads + 2 kv_heads) * head_dim]; ``positions`` (int64 [T]) are row numbers of ``cosines`` and
    ``sines`` [positions, head_dim / 2].

    ``heads`` are (query_heads, kv_heads). ``pool``, if there is one, is (K, V, slots): rotated keys and values also go
    to ``slots`` (int64 [T], negative for padding, which is not written) of K and V [pages, page_size, kv_heads,
    head_dim], or of bytes, head_bytes, where they are rounded. ``norms`` are weights [head_dim] for queries and keys,
    and epsilon; they are applied first. Rounds where Hugging Face's modules do. Raises InvariantViolated for shapes,
    dtypes or strides that do not belong together.
    """
    query_heads, kv_heads = heads
    half = cosines.shape[1]
    rows, width = qkv.shape
    if width != (query_heads + 2 * kv_heads) * 2 * half or query_heads % kv_heads or qkv.stride(1) != 1:
        raise InvariantViolated(f"{query_heads} and {kv_heads} heads of {2 * half} are not in rows of {width}")
    if cosines.shape != sines.shape or not cosines.is_contiguous() or not sines.is_contiguous():
        raise InvariantViolated("cosines and sines must lie alike")
    if not cosines.dtype == sines.dtype == qkv.dtype or positions.shape != (rows,):
        raise InvariantViolated(f"{tuple(positions.shape)} positions cannot rotate {rows} rows")
    k_pool, v_pool, slots = (qkv, qkv, positions) if pool is None else pool
    if pool is not None:
        _check_pool(k_pool, v_pool, slots, qkv, kv_heads, 2 * half)
    if not rows:
        return
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    group = query_heads // kv_heads
    rope_write_kernel[(rows, kv_heads)](
        qkv, k_pool, v_pool, slots, positions, cosines, sines, q_weight, k_weight, eps, kv_heads, qkv.stride(0),
        0 if pool is None else k_pool.stride(1), 0 if pool is None else k_pool.stride(2),
        HAS_NORM=norms is not None, WRITES=pool is not None, GROUP=group, HALF=half,
        BLOCK_G=next_power_of_two(group), BLOCK_HALF=next_power_of_two(half), num_warps=rope_warps(group, half),
    )  # fmt: skip


def rope_warps(group: int, half: int) -> int:
    """Return the warps for the query heads of a KV head: 8 numbers a thread and half of a head, in 1 to 8 warps."""
    return max(1, min(8, next_power_of_two(group) * next_power_of_two(half) // 256))


def _check_pool(
    k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor, qkv: torch.Tensor, kv_heads: int, head_dim: int
) -> None:
    pages_adjoin = k_pool.stride(0) == k_pool.shape[1] * k_pool.stride(1)
    alike = (
        k_pool.stride() == v_pool.stride() and k_pool.dtype == v_pool.dtype and k_pool.dtype in (qkv.dtype, torch.uint8)
    )
    if not (
        alike
        and pages_adjoin
        and k_pool.shape[2:] == (kv_heads, kept_width(k_pool, head_dim))
        and slots.shape == qkv.shape[:1]
    ):
        raise InvariantViolated(f"{kv_heads} heads of {head_dim} cannot be written into a pool {tuple(k_pool.shape)}")
    if k_pool.stride(3) != 1:
        raise InvariantViolated("the numbers of one head must be adjacent in memory")
