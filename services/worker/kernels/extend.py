"""Extend: the rows of a prefill chunk over their paged context and, causally, over one another.

The new rows' own K and V are in the pool already, so there is one source of keys. A program takes a tile of
consecutive tokens for one KV head; a tile's rows are its tokens times the GQA group, so K and V are read once for all
query heads that share them.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.kernels.block_sizes import BlockSizes
from services.worker.kernels.online_softmax import attend_keys, bound_of, first_visible, sunk


# Nothing is specialised on values that differ from step to step: each variant would be compiled while requests wait.
@triton.jit(do_not_specialize=["stride_table"])
def extend_kernel(
    q,
    k_pool,
    v_pool,
    out,
    cu_rows,
    context,
    page_table,
    sinks,
    scaling,
    softcap,
    reach,
    heads,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    BOUND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend for a tile of a segment of several rows; grid (segments, kv_heads, tiles of the longest segment)."""
    segment, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(cu_rows + segment)
    rows = tl.load(cu_rows + segment + 1) - first_row
    tile_start = tile * (BLOCK_M // PADDED_GROUP)
    if (rows == 1) | (tile_start >= rows):
        return
    before = tl.load(context + segment)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = tile_start + members // PADDED_GROUP
    member = members % PADDED_GROUP
    head = kv_head * GROUP + member
    is_real = ((token < rows) & (member < GROUP))[:, None] & (dims[None, :] < HEAD_DIM)
    batch_row = (first_row + token).to(tl.int64)
    query_at = q + batch_row[:, None] * stride_q_row + head[:, None] * stride_q_head + dims[None, :]
    query = tl.load(query_at, mask=is_real, other=0.0)
    position = before + token
    # The keys that rows of the tile see: from the first row's window or chunk to the last row itself.
    low = first_visible(before + tile_start, reach, BOUND)
    high = before + tl.minimum(rows, tile_start + BLOCK_M // PADDED_GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        visible = keys[None, :] <= position[:, None]
        if BOUND == 1:  # Without a bound below at 0, which no key needs: it would cost registers.
            visible = visible & (keys[None, :] > position[:, None] - reach)
        if BOUND == 2:
            visible = visible & (keys[None, :] >= first_visible(position, reach, BOUND)[:, None])
        total, row_max, row_sum = attend_keys(
            query, total, row_max, row_sum,
            k_pool + kv_head * stride_kv_head, v_pool + kv_head * stride_kv_head, page_table + segment * stride_table,
            keys, keys < high, visible, stride_page, stride_slot, scaling, softcap,
            HAS_SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    # Rows beyond the segment may have seen nothing; they are not stored.
    result = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=member < GROUP, other=0.0)
        result = sunk(result, (row_max + tl.log2(row_sum))[:, None], sink[:, None])
    into = out + (batch_row[:, None] * heads + head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(into, result.to(out.dtype.element_ty), mask=is_real)


def extend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    cu_rows: torch.Tensor,
    context: torch.Tensor,
    page_table: torch.Tensor,
    *,
    max_rows: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
    sizes: BlockSizes,
) -> None:
    """Attend for every segment of several rows, into ``out`` [T, heads, head_dim] (contiguous), not for other rows."""
    _, heads, head_dim = q.shape
    segments, kv_heads = len(context), k_pool.shape[2]
    tiles = triton.cdiv(max_rows, sizes.extend_rows // sizes.group)
    bound, reach = bound_of(window, chunk)
    extend_kernel[(segments, kv_heads, tiles)](
        q, k_pool, v_pool, out, cu_rows, context, page_table, q if sinks is None else sinks,
        scaling, softcap or 0.0, reach, heads, q.stride(0), q.stride(1),
        k_pool.stride(0), k_pool.stride(1), k_pool.stride(2), page_table.stride(0),
        BOUND=bound, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        GROUP=heads // kv_heads, PADDED_GROUP=sizes.group, PAGE_SIZE=k_pool.shape[1], HEAD_DIM=head_dim,
        BLOCK_D=sizes.block_d, BLOCK_M=sizes.extend_rows, BLOCK_N=sizes.block_n,
        num_warps=sizes.num_warps, num_stages=sizes.num_stages,
    )  # fmt: skip
