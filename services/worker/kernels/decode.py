"""Decode: one query row against a long context, cut into splits that run side by side (flash-decoding).

A program takes one split of one request's keys for one KV head; the query heads of that KV head (the GQA group) are
its rows, so K and V are read once for all of them. A second kernel joins the splits by their log-sum-exp.

How a row is cut depends on nothing but the keys that it sees itself. The sums are therefore the same whatever else is
in the batch: a token does not change with its neighbours. Splits that rows share are computed once for all of them
(:mod:`services.worker.engine.shared_prefixes`), over the same keys in the same order, in larger tiles.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.engine.forward_meta import SharedTensors
from services.worker.engine.key_splits import MAX_SPLITS, SPLIT_KEYS, splits_for
from services.worker.engine.shared_prefixes import MEMBERS
from services.worker.engine.visibility import most_visible
from services.worker.kernels.block_sizes import BlockSizes
from services.worker.kernels.online_softmax import UNBOUNDED, attend_keys, bound_of, first_visible, sunk


@triton.jit
def keys_per_split(visible, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the keys of one split of a row that sees ``visible`` keys; at most MAX_SPLITS are needed."""
    return SPLIT_KEYS * tl.cdiv(visible, SPLIT_KEYS * MAX_SPLITS)


# Nothing is specialised on values that differ from step to step: each variant would be compiled while requests wait.
@triton.jit(do_not_specialize=["stride_table", "has_shared"])
def decode_split_kernel(
    q,
    k_pool,
    v_pool,
    out,
    partial,
    partial_lse,
    cu_rows,
    context,
    page_table,
    row_keys,
    has_shared,
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
    IS_ONLY_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Attend in one split of a decode row, not of longer segments; grid (segments, kv_heads, splits)."""
    segment, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(cu_rows + segment)
    if tl.load(cu_rows + segment + 1) - row != 1:
        return
    length = tl.load(context + segment) + 1
    first = first_visible(length - 1, reach, BOUND)
    per_split = keys_per_split(length - first, SPLIT_KEYS, MAX_SPLITS)
    low = first + split * per_split
    high = tl.minimum(length, low + per_split)
    if low >= high:
        return
    if BOUND == 0:
        # The shared kernel attends to keys that rows share.
        shared = tl.load(row_keys + segment, mask=has_shared != 0, other=0)
        if low + per_split <= shared:
            return
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + members
    is_real = (members[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    q_head = q + row.to(tl.int64) * stride_q_row
    query = tl.load(q_head + head[:, None] * stride_q_head + dims[None, :], mask=is_real, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        exists = keys < high
        total, row_max, row_sum = attend_keys(
            query, total, row_max, row_sum,
            k_pool + kv_head * stride_kv_head, v_pool + kv_head * stride_kv_head, page_table + segment * stride_table,
            keys, exists, exists[None, :], stride_page, stride_slot, scaling, softcap,
            HAS_SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    result = total / row_sum[:, None]
    if IS_ONLY_SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=members < GROUP, other=0.0)
            result = sunk(result, (row_max + tl.log2(row_sum))[:, None], sink[:, None])
        into = out + (row.to(tl.int64) * heads + head[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(into, result.to(out.dtype.element_ty), mask=is_real)
    else:
        place = (segment.to(tl.int64) * heads + head) * tl.num_programs(2) + split
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], result, mask=is_real)
        tl.store(partial_lse + place, row_max + tl.log2(row_sum), mask=members < GROUP)


@triton.jit(do_not_specialize=["stride_table", "splits"])
def decode_shared_kernel(
    q,
    k_pool,
    v_pool,
    partial,
    partial_lse,
    cu_rows,
    context,
    page_table,
    tile_rows,
    tile_keys,
    scaling,
    softcap,
    heads,
    splits,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Attend in one split for the rows of a tile, which have its keys in the same pages.

    The grid is (tiles * PARTS, kv_heads, splits). A program takes a PARTS-th of a tile's MEMBERS rows.
    """
    tile, kv_head, split = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    shared = tl.load(tile_keys + tile)
    if shared == 0:
        return
    leader = tl.load(tile_rows + tile * MEMBERS)
    per_split = keys_per_split(tl.load(context + leader) + 1, SPLIT_KEYS, MAX_SPLITS)
    low = split * per_split
    if low + per_split > shared:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    number = (tl.program_id(0) % PARTS) * (MEMBERS // PARTS) + rows // PADDED_GROUP
    segment = tl.load(tile_rows + tile * MEMBERS + number)
    member = rows % PADDED_GROUP
    head = kv_head * GROUP + member
    is_row = (segment >= 0) & (member < GROUP)
    is_real = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    batch_row = tl.load(cu_rows + segment, mask=segment >= 0, other=0).to(tl.int64)
    query_at = q + batch_row[:, None] * stride_q_row + head[:, None] * stride_q_head + dims[None, :]
    query = tl.load(query_at, mask=is_real, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(low, low + per_split, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        exists = keys < shared
        total, row_max, row_sum = attend_keys(
            query, total, row_max, row_sum,
            k_pool + kv_head * stride_kv_head, v_pool + kv_head * stride_kv_head, page_table + leader * stride_table,
            keys, exists, exists[None, :], stride_page, stride_slot, scaling, softcap,
            HAS_SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    place = (segment.to(tl.int64) * heads + head) * splits + split
    result = total / row_sum[:, None]
    tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], result, mask=is_real)
    tl.store(partial_lse + place, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit(do_not_specialize=["splits"])
def decode_join_kernel(
    out,
    partial,
    partial_lse,
    cu_rows,
    context,
    sinks,
    reach,
    heads,
    splits,
    BOUND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Join the splits of a row, weighted by their shares of its softmax; grid (segments, heads)."""
    segment, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_rows + segment)
    if tl.load(cu_rows + segment + 1) - row != 1:
        return
    position = tl.load(context + segment)
    visible = position + 1 - first_visible(position, reach, BOUND)
    used = tl.cdiv(visible, keys_per_split(visible, SPLIT_KEYS, MAX_SPLITS))
    dims = tl.arange(0, BLOCK_D)
    place = (segment.to(tl.int64) * heads + head) * splits
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    largest = tl.load(partial_lse + place)
    weight_sum = 0.0
    for split in range(used):
        lse = tl.load(partial_lse + place + split)
        new_largest = tl.maximum(largest, lse)
        decay, weight = tl.exp2(largest - new_largest), tl.exp2(lse - new_largest)
        part = tl.load(partial + (place + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        total = total * decay + part * weight
        weight_sum = weight_sum * decay + weight
        largest = new_largest
    result = total / weight_sum
    if HAS_SINKS:
        result = sunk(result, largest + tl.log2(weight_sum), tl.load(sinks + head))
    into = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + dims
    tl.store(into, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    cu_rows: torch.Tensor,
    context: torch.Tensor,
    page_table: torch.Tensor,
    shared: SharedTensors | None,
    *,
    max_length: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
    sizes: BlockSizes,
) -> None:
    """Attend for every segment of one row, into ``out`` [T, heads, head_dim] (contiguous); other rows are unchanged."""
    _, heads, head_dim = q.shape
    segments, kv_heads = len(context), k_pool.shape[2]
    splits = splits_for(most_visible(max_length, window, chunk))
    bound, reach = bound_of(window, chunk)
    partial = torch.empty((segments, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((segments, heads, splits), dtype=torch.float32, device=q.device)
    decode_split_kernel[(segments, kv_heads, splits)](
        q, k_pool, v_pool, out, partial, partial_lse, cu_rows, context, page_table,
        context if shared is None else shared.row_keys, int(shared is not None), q if sinks is None else sinks,
        scaling, softcap or 0.0, reach, heads, q.stride(0), q.stride(1),
        k_pool.stride(0), k_pool.stride(1), k_pool.stride(2), page_table.stride(0),
        BOUND=bound, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, IS_ONLY_SPLIT=splits == 1,
        GROUP=heads // kv_heads, PAGE_SIZE=k_pool.shape[1], HEAD_DIM=head_dim,
        BLOCK_D=sizes.block_d, BLOCK_M=sizes.decode_rows, BLOCK_N=sizes.block_n,
        SPLIT_KEYS=SPLIT_KEYS, MAX_SPLITS=MAX_SPLITS, num_warps=sizes.num_warps, num_stages=sizes.num_stages,
    )  # fmt: skip
    if splits > 1 and shared is not None and bound == UNBOUNDED:
        _attend_shared(
            q, k_pool, v_pool, partial, partial_lse, cu_rows, context, page_table, shared,
            splits=splits, scaling=scaling, softcap=softcap, sizes=sizes,
        )  # fmt: skip
    if splits > 1:
        decode_join_kernel[(segments, heads)](
            out, partial, partial_lse, cu_rows, context, q if sinks is None else sinks, reach, heads, splits,
            BOUND=bound, HAS_SINKS=sinks is not None, HEAD_DIM=head_dim, BLOCK_D=sizes.block_d,
            SPLIT_KEYS=SPLIT_KEYS, MAX_SPLITS=MAX_SPLITS, num_warps=sizes.num_warps,
        )  # fmt: skip


def _attend_shared(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    cu_rows: torch.Tensor,
    context: torch.Tensor,
    page_table: torch.Tensor,
    shared: SharedTensors,
    *,
    splits: int,
    scaling: float,
    softcap: float | None,
    sizes: BlockSizes,
) -> None:
    """Compute the splits that several rows share, which the split kernel leaves out."""
    heads, head_dim, kv_heads = q.shape[1], q.shape[2], k_pool.shape[2]
    in_program = min(MEMBERS, sizes.extend_rows // sizes.group)
    parts = MEMBERS // in_program
    decode_shared_kernel[(len(shared.tile_keys) * parts, kv_heads, splits)](
        q, k_pool, v_pool, partial, partial_lse, cu_rows, context, page_table, shared.tile_rows, shared.tile_keys,
        scaling, softcap or 0.0, heads, splits, q.stride(0), q.stride(1),
        k_pool.stride(0), k_pool.stride(1), k_pool.stride(2), page_table.stride(0),
        HAS_SOFTCAP=softcap is not None, GROUP=heads // kv_heads, PADDED_GROUP=sizes.group,
        MEMBERS=MEMBERS, PARTS=parts,
        PAGE_SIZE=k_pool.shape[1], HEAD_DIM=head_dim, BLOCK_D=sizes.block_d, BLOCK_M=in_program * sizes.group,
        BLOCK_N=sizes.block_n, SPLIT_KEYS=SPLIT_KEYS, MAX_SPLITS=MAX_SPLITS,
        num_warps=sizes.num_warps, num_stages=sizes.num_stages,
    )  # fmt: skip
