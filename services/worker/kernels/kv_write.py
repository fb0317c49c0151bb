"""Write the step's new K and V into their slots of the paged pool, both in one launch."""

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
def write_heads(pool, first, target, source, is_head, is_real, HEAD_DIM: tl.constexpr):
    """Write heads at ``source`` [M, N] to ``target`` [M, N] of a pool, where those heads begin at ``first`` [M, 1]."""
    values = tl.load(source, mask=is_real, other=0.0)
    if pool.dtype.element_ty == tl.uint8:
        wide = values.to(tl.float32)
        exponent, is_finite = scale_of(wide)
        tl.store(pool + target, codes_of(wide, exponent, is_finite), mask=is_real)
        store_scale(pool + first, exponent, is_finite, is_head, HEAD_DIM)
    else:
        tl.store(pool + target, values, mask=is_real)


@triton.jit
def kv_write_kernel(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    kv_heads,
    stride_row,
    stride_head,
    stride_slot,
    stride_pool_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the K and V of one row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    head, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    is_real = (head < kv_heads) & (dims < HEAD_DIM)
    source = row * stride_row + head * stride_head + dims
    target = slot * stride_slot + head * stride_pool_head + dims
    write_heads(
        k_pool, slot * stride_slot + head * stride_pool_head, target, k + source, head < kv_heads, is_real, HEAD_DIM
    )
    write_heads(
        v_pool, slot * stride_slot + head * stride_pool_head, target, v + source, head < kv_heads, is_real, HEAD_DIM
    )


def kv_write(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write row i of k and v [T, kv_heads, head_dim] into slot ``slots[i]`` of k_pool and v_pool.

    Slots are int64 [T], page * page_size + offset. Pools are [pages, page_size, kv_heads, head_dim], or of bytes,
    head_bytes, where they are rounded. A row with a negative slot (padding) is not written.

    Raises InvariantViolated for shapes or strides that do not belong together.
    """
    rows, kv_heads, head_dim = k.shape
    pages_adjoin = k_pool.stride(0) == k_pool.shape[1] * k_pool.stride(1)
    alike = k.shape == v.shape and k.stride() == v.stride() and k_pool.stride() == v_pool.stride()
    if not (
        alike
        and pages_adjoin
        and k_pool.shape[2:] == (kv_heads, kept_width(k_pool, head_dim))
        and slots.shape == (rows,)
    ):
        raise InvariantViolated(f"K {tuple(k.shape)} cannot be written into a pool {tuple(k_pool.shape)}")
    if k.stride(2) != 1 or k_pool.stride(3) != 1:
        raise InvariantViolated("the numbers of one head must be adjacent in memory")
    kv_write_kernel[(rows,)](
        k, v, k_pool, v_pool, slots, kv_heads, k.stride(0), k.stride(1), k_pool.stride(1), k_pool.stride(2),
        HEAD_DIM=head_dim, BLOCK_H=next_power_of_two(kv_heads), BLOCK_D=next_power_of_two(head_dim),
    )  # fmt: skip
