"""Attention whose result for a row depends on its position and its keys alone.

One kernel computes decode rows and chunks of prompts. Keys are cut at multiples of ``SPLIT_KEYS``, counted from the
start of the request, and within a split at multiples of the block; each split gives a softmax of its own, and splits
are merged in the order of their keys. A chunk's program goes through the splits of its tile one after the other; those
of a decode row are computed side by side and merged by a second kernel, by the same function. A block that a row does
not see leaves the row's sums unchanged: its weights are 0 and its decay is exactly 1.

Fixed sizes of splits instead of fixed numbers of them follow published work on batch-invariant attention (He et al.,
"Defeating Nondeterminism in LLM Inference", 2025).
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.engine.forward_meta import PagedTensors
from services.worker.kernels.block_sizes import block_sizes
from services.worker.kernels.online_softmax import attend_keys, bound_of, first_visible, sunk
from services.worker.kernels.paged_attention import check_attention

SPLIT_KEYS = 1024
"""Keys of one split. The longest context of 131,072 tokens has 128, whose results take 64 KiB a query head."""

_ALL_SPLITS = 1 << 30


@triton.jit
def merge_split(total, largest, weight_sum, part, lse):
    """Add one split to the result of the splits before it.

    That result is total [M, D], largest and weight_sum [M]; the split is part [M, D], lse [M].

    The multiply-add is spelled out, because a compiler may fuse ``a * b + c * d`` either way, and this function is
    compiled into two kernels that must agree.
    """
    new_largest = tl.maximum(largest, lse)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    decay, weight = tl.exp2(largest - base), tl.exp2(lse - base)
    total = tl.fma(total, decay[:, None], part * weight[:, None])
    return total, new_largest, tl.fma(weight_sum, decay, weight)


@triton.jit
def divided(total, weight_sum):
    """Return ``total / weight_sum``, 0 for rows without any key."""
    return total / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]


# Nothing is specialised on values that differ from step to step: another variant could have other instructions.
@triton.jit(do_not_specialize=["stride_q_row", "stride_q_head", "stride_table", "is_single", "parts", "splits_each"])
def exact_attention_kernel(
    q,
    k_pool,
    v_pool,
    out,
    partial,
    partial_lse,
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
    is_single,
    parts,
    splits_each,
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
    SPLIT_KEYS: tl.constexpr,
):
    """Attend for a tile; grid (segments, kv_heads, tiles * parts).

    ``is_single``: this launch takes the segments of one row, otherwise all others. With several ``parts`` each computes
    ``splits_each`` splits, and its result goes to ``partial``.
    """
    segment, kv_head = tl.program_id(0), tl.program_id(1)
    tile, part_number = tl.program_id(2) // parts, tl.program_id(2) % parts
    first_row = tl.load(cu_rows + segment)
    rows = tl.load(cu_rows + segment + 1) - first_row
    tile_start = tile * (BLOCK_M // PADDED_GROUP)
    if ((rows == 1) != (is_single == 1)) | (tile_start >= rows):
        return
    before = tl.load(context + segment)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = tile_start + members // PADDED_GROUP
    member = members % PADDED_GROUP
    head = kv_head * GROUP + member
    is_row = (token < rows) & (member < GROUP)
    is_real = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    batch_row = (first_row + token).to(tl.int64)
    query_at = q + batch_row[:, None] * stride_q_row + head.to(tl.int64)[:, None] * stride_q_head + dims[None, :]
    query = tl.load(query_at, mask=is_real, other=0.0)
    position = before + token
    low = first_visible(before + tile_start, reach, BOUND)
    high = before + tl.minimum(rows, tile_start + BLOCK_M // PADDED_GROUP)
    begin = low // SPLIT_KEYS + part_number * splits_each
    end = tl.minimum(tl.cdiv(high, SPLIT_KEYS), begin + splits_each)
    if begin >= end:
        return
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in range(begin, end):
        split_total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        # Blocks begin at multiples of BLOCK_N, wherever the window or the tile does.
        start_from = tl.maximum(split * SPLIT_KEYS, low // BLOCK_N * BLOCK_N)
        for start in range(start_from, tl.minimum(high, (split + 1) * SPLIT_KEYS), BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            visible = keys[None, :] <= position[:, None]
            if BOUND != 0:
                visible = visible & (keys[None, :] >= first_visible(position, reach, BOUND)[:, None])
            split_total, row_max, row_sum = attend_keys(
                query, split_total, row_max, row_sum,
                k_pool + kv_head * stride_kv_head, v_pool + kv_head * stride_kv_head,
                page_table + segment * stride_table,
                keys, (keys >= low) & (keys < high), visible, stride_page, stride_slot, scaling, softcap,
                HAS_SOFTCAP, PAGE_SIZE, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        lse = row_max + tl.log2(row_sum)  # -inf where a row sees nothing of the split.
        total, largest, weight_sum = merge_split(total, largest, weight_sum, divided(split_total, row_sum), lse)
    if parts == 1:
        result = divided(total, weight_sum)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=member < GROUP, other=0.0)
            result = sunk(result, (largest + tl.log2(weight_sum))[:, None], sink[:, None])
        into = out + (batch_row[:, None] * heads + head[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(into, result.to(out.dtype.element_ty), mask=is_real)
    else:
        # One split a part, so weight_sum is 1.
        place = (segment.to(tl.int64) * heads + head) * parts + part_number
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], total, mask=is_real)
        tl.store(partial_lse + place, largest, mask=is_row)


@triton.jit(do_not_specialize=["parts"])
def exact_join_kernel(
    out,
    partial,
    partial_lse,
    cu_rows,
    context,
    sinks,
    reach,
    heads,
    parts,
    BOUND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Merge the splits of a single row, one after the other; grid (segments, heads)."""
    segment, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_rows + segment)
    if tl.load(cu_rows + segment + 1) - row != 1:
        return
    length = tl.load(context + segment) + 1
    low = first_visible(length - 1, reach, BOUND)
    used = tl.cdiv(length, SPLIT_KEYS) - low // SPLIT_KEYS
    dims = tl.arange(0, BLOCK_D)[None, :]
    one = tl.arange(0, 1)
    place = (segment.to(tl.int64) * heads + head) * parts
    total = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    largest = tl.full([1], float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros([1], dtype=tl.float32)
    for number in range(used):
        lse = tl.load(partial_lse + place + number + one)
        part = tl.load(partial + (place + number) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        total, largest, weight_sum = merge_split(total, largest, weight_sum, part, lse)
    result = divided(total, weight_sum)
    if HAS_SINKS:
        result = sunk(result, (largest + tl.log2(weight_sum))[:, None], tl.load(sinks + head))
    into = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + dims
    tl.store(into, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    paged: PagedTensors,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention as :func:`services.worker.kernels.paged_attention` does.

    Its rows are the same to the bit in any step.
    """
    check_attention(q, k_pool, v_pool, window, chunk, sinks)
    layer = _Layer(scaling, softcap, *bound_of(window, chunk), sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = block_sizes(q.shape[2], q.shape[1] // k_pool.shape[2], k_pool.element_size())
    if paged.max_rows > 1:
        tiles = triton.cdiv(paged.max_rows, sizes.extend_rows // sizes.group)
        _launch(q, k_pool, v_pool, out, paged, layer, tiles=tiles, parts=1)
    if paged.max_rows == 1 or len(paged.context) > 1:
        parts = parts_of(paged.max_length, window if chunk is None else chunk)
        _launch(q, k_pool, v_pool, out, paged, layer, tiles=0, parts=parts)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    """The properties of a layer that its kernel takes; ``bound`` and ``reach`` are those of :func:`bound_of`."""

    scaling: float
    softcap: float | None
    bound: int
    reach: int
    sinks: torch.Tensor | None


def parts_of(max_length: int, window: int | None) -> int:
    """Return the splits with visible keys for a single row of up to ``max_length`` tokens.

    A chunk counts as a window.
    """
    parts = triton.cdiv(max_length, SPLIT_KEYS)
    # A window may begin within one split and end within another.
    return parts if window is None else min(parts, triton.cdiv(window, SPLIT_KEYS) + 1)


def _launch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    paged: PagedTensors,
    layer: _Layer,
    *,
    tiles: int,
    parts: int,
) -> None:
    """Attend for the segments of several rows in ``tiles`` tiles, or with 0 tiles for those of a single row."""
    _, heads, head_dim = q.shape
    segments, kv_heads = len(paged.context), k_pool.shape[2]
    sizes = block_sizes(head_dim, heads // kv_heads, k_pool.element_size())
    places = segments * heads * parts if parts > 1 else 1  # One that is never written.
    partial = torch.empty((places, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((places,), dtype=torch.float32, device=q.device)
    common = {
        "BOUND": layer.bound, "HAS_SINKS": layer.sinks is not None, "HEAD_DIM": head_dim, "BLOCK_D": sizes.block_d,
        "SPLIT_KEYS": SPLIT_KEYS, "num_warps": sizes.num_warps,
    }  # fmt: skip
    sinks = q if layer.sinks is None else layer.sinks
    exact_attention_kernel[(segments, kv_heads, max(tiles, 1) * parts)](
        q, k_pool, v_pool, out, partial, partial_lse, paged.cu_rows, paged.context, paged.page_table, sinks,
        layer.scaling, layer.softcap or 0.0, layer.reach, heads, q.stride(0), q.stride(1),
        k_pool.stride(0), k_pool.stride(1), k_pool.stride(2), paged.page_table.stride(0),
        int(tiles == 0), parts, 1 if parts > 1 else _ALL_SPLITS,
        HAS_SOFTCAP=layer.softcap is not None, GROUP=heads // kv_heads, PADDED_GROUP=sizes.group,
        PAGE_SIZE=k_pool.shape[1], BLOCK_M=sizes.extend_rows, BLOCK_N=sizes.block_n, num_stages=sizes.num_stages,
        **common,
    )  # fmt: skip
    if parts > 1:
        exact_join_kernel[(segments, heads)](
            out, partial, partial_lse, paged.cu_rows, paged.context, sinks, layer.reach, heads, parts, **common
        )  # fmt: skip
