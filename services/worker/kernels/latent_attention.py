"""Attention to latents in the pool: multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A key is one row of ``rank + rope`` values that all heads share; its value is the row's first ``rank`` values. So a
program loads a block of latents once and multiplies by it twice, for scores and for sums. Rows of a tile are tokens
times heads. Single rows are cut into splits that run side by side, by the same rule as in
:mod:`services.worker.kernels.decode`, which depends on nothing but the keys that a row sees; longer segments go tile by
tile, each over all of its keys.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.engine.forward_meta import PagedTensors
from services.worker.engine.kernel_limits import MAX_RANK, MAX_ROPE
from services.worker.engine.key_splits import MAX_SPLITS, SPLIT_KEYS, splits_for
from services.worker.engine.visibility import most_visible
from services.worker.kernels.block_sizes import LatentSizes, latent_sizes
from services.worker.kernels.decode import decode_join_kernel, keys_per_split
from services.worker.kernels.layer_checks import check_layer
from services.worker.kernels.online_softmax import bound_of, first_visible, sunk, weigh
from shared.errors import InvariantViolated


@triton.jit
def attend_latents(
    query,
    turned,
    total,
    row_max,
    row_sum,
    pool,
    table,
    keys,
    exists,
    visible,
    stride_page,
    stride_slot,
    scaling,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Return the new (total, row_max, row_sum) after one block of latents, as ``online_softmax.attend_keys`` does.

    query [M, BLOCK_R] and turned [M, BLOCK_P] are the parts of queries for latents and for the rotated part of keys.
    """
    ranks, ropes = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    pages = tl.load(table + keys // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    slots = pool + pages * stride_page + (keys % PAGE_SIZE) * stride_slot
    latent = tl.load(slots[:, None] + ranks[None, :], mask=exists[:, None] & (ranks[None, :] < RANK), other=0.0)
    shared = tl.load(slots[:, None] + RANK + ropes[None, :], mask=exists[:, None] & (ropes[None, :] < ROPE), other=0.0)
    # "ieee" keeps fp32 exact; on 16-bit types it changes nothing.
    scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(turned, tl.trans(shared), scores, input_precision="ieee") * scaling
    weights, decay, new_max = weigh(scores, row_max, visible, softcap, HAS_SOFTCAP)
    total = total * decay[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
    return total, new_max, row_sum * decay + tl.sum(weights, 1)


# Nothing is specialised on values that differ from step to step: each variant would be compiled while requests wait.
@triton.jit(do_not_specialize=["stride_table"])
def latent_attention_kernel(
    q,
    pool,
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
    stride_table,
    IS_DECODE: tl.constexpr,
    IS_ONLY_SPLIT: tl.constexpr,
    BOUND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Attend for a tile; grid (segments, tiles of the longest segment, splits).

    With IS_DECODE it takes segments of one row, else all others.
    """
    segment, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(cu_rows + segment)
    rows = tl.load(cu_rows + segment + 1) - first_row
    first_token = tile * BLOCK_M // PADDED_HEADS
    if ((rows == 1) != IS_DECODE) | (first_token >= rows):
        return
    before = tl.load(context + segment)
    if IS_DECODE:
        low = first_visible(before, reach, BOUND)
        per_split = keys_per_split(before + 1 - low, SPLIT_KEYS, MAX_SPLITS)
        low += split * per_split
        high = tl.minimum(before + 1, low + per_split)
        if low >= high:
            return
    else:
        # The keys that rows of the tile see: from the first token's window or chunk to the last token itself.
        low = first_visible(before + first_token, reach, BOUND)
        high = before + tl.minimum(rows, (tile * BLOCK_M + BLOCK_M - 1) // PADDED_HEADS + 1)
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = member // PADDED_HEADS, member % PADDED_HEADS
    is_row = (token < rows) & (head < heads)
    batch_row = (first_row + token).to(tl.int64)
    position = before + token
    ranks, ropes = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    q_row = q + batch_row[:, None] * stride_q_row + head[:, None] * stride_q_head
    query = tl.load(q_row + ranks[None, :], mask=is_row[:, None] & (ranks[None, :] < RANK), other=0.0)
    turned = tl.load(q_row + RANK + ropes[None, :], mask=is_row[:, None] & (ropes[None, :] < ROPE), other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table = page_table + segment * stride_table
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        exists = keys < high
        visible = exists[None, :]
        if not IS_DECODE:
            visible = keys[None, :] <= position[:, None]
            if BOUND != 0:
                visible = visible & (keys[None, :] >= first_visible(position, reach, BOUND)[:, None])
        total, row_max, row_sum = attend_latents(
            query, turned, total, row_max, row_sum, pool, table, keys, exists, visible, stride_page, stride_slot,
            scaling, softcap, HAS_SOFTCAP, PAGE_SIZE, RANK, ROPE, BLOCK_R, BLOCK_P,
        )  # fmt: skip
    # Rows behind the segment may have seen nothing; they are not stored.
    result = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    is_real = is_row[:, None] & (ranks[None, :] < RANK)
    if IS_ONLY_SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0)
            result = sunk(result, (row_max + tl.log2(row_sum))[:, None], sink[:, None])
        into = out + (batch_row[:, None] * heads + head[:, None]) * RANK + ranks[None, :]
        tl.store(into, result.to(out.dtype.element_ty), mask=is_real)
    else:
        place = (segment.to(tl.int64) * heads + head) * tl.num_programs(2) + split
        tl.store(partial + place[:, None] * RANK + ranks[None, :], result, mask=is_real)
        tl.store(partial_lse + place, row_max + tl.log2(row_sum), mask=is_row)


def latent_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    paged: PagedTensors,
    *,
    rank: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output ``[T, heads, rank]``, contiguous, of q's dtype (fp32, bf16 or fp16).

    q [T, heads, rank + rope], any strides but for the last, which is 1: queries that include the expansion of keys.
    pool [pages, page_size, 1, rank + rope] holds the step's own latents already. The rest is as in
    ``services.worker.kernels.paged_attention``, except that each row reads shared keys by itself. Raises
    InvariantViolated for shapes that do not belong together.
    """
    check_latents(q, pool, rank, window, chunk, sinks)
    out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
    sizes = latent_sizes(rank, q.shape[2] - rank, q.shape[1], pool.element_size())
    layer = scaling, window, softcap, chunk, sinks
    # A mixed step is two launches; each leaves the other's segments at once.
    if paged.max_rows > 1:
        _launch(q, pool, out, paged, layer, sizes, is_decode=False)
    if paged.max_rows == 1 or len(paged.context) > 1:
        _launch(q, pool, out, paged, layer, sizes, is_decode=True)
    return out


_Layer = tuple[float, int | None, float | None, int | None, torch.Tensor | None]
"""Scaling, window, softcap, chunk and sinks."""


def _launch(
    q: torch.Tensor,
    pool: torch.Tensor,
    out: torch.Tensor,
    paged: PagedTensors,
    layer: _Layer,
    sizes: LatentSizes,
    *,
    is_decode: bool,
) -> None:
    """Attend for the segments of one row, or for all others, into ``out``; other rows are unchanged."""
    scaling, window, softcap, chunk, sinks = layer
    segments, heads, rank = len(paged.context), q.shape[1], out.shape[2]
    splits = splits_for(most_visible(paged.max_length, window, chunk)) if is_decode else 1
    tiles = triton.cdiv((1 if is_decode else paged.max_rows) * sizes.heads, sizes.rows)
    bound, reach = bound_of(window, chunk)
    is_split = splits > 1
    partial = torch.empty((segments, heads, splits, rank) if is_split else 0, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((segments, heads, splits) if is_split else 0, dtype=torch.float32, device=q.device)
    latent_attention_kernel[(segments, tiles, splits)](
        q, pool, out, partial, partial_lse, paged.cu_rows, paged.context, paged.page_table,
        q if sinks is None else sinks, scaling, softcap or 0.0, reach, heads, q.stride(0), q.stride(1),
        pool.stride(0), pool.stride(1), paged.page_table.stride(0),
        IS_DECODE=is_decode, IS_ONLY_SPLIT=not is_split, BOUND=bound, HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None, PADDED_HEADS=sizes.heads, PAGE_SIZE=pool.shape[1], RANK=rank,
        ROPE=q.shape[2] - rank, BLOCK_R=sizes.block_r, BLOCK_P=sizes.block_p, BLOCK_M=sizes.rows,
        BLOCK_N=sizes.block_n, SPLIT_KEYS=SPLIT_KEYS, MAX_SPLITS=MAX_SPLITS,
        num_warps=sizes.num_warps, num_stages=sizes.num_stages,
    )  # fmt: skip
    if is_split:
        decode_join_kernel[(segments, heads)](
            out, partial, partial_lse, paged.cu_rows, paged.context, q if sinks is None else sinks, reach, heads,
            splits, BOUND=bound, HAS_SINKS=sinks is not None, HEAD_DIM=rank, BLOCK_D=sizes.block_r,
            SPLIT_KEYS=SPLIT_KEYS, MAX_SPLITS=MAX_SPLITS, num_warps=sizes.num_warps,
        )  # fmt: skip


def check_latents(
    q: torch.Tensor,
    pool: torch.Tensor,
    rank: int,
    window: int | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise InvariantViolated for shapes that do not belong together."""
    heads, width = q.shape[1:]
    if pool.shape[2:] != (1, width) or q.dtype != pool.dtype:
        raise InvariantViolated(f"queries of {width} {q.dtype} cannot attend to latents {tuple(pool.shape[2:])}")
    if not 0 < rank <= MAX_RANK or not 0 < width - rank <= MAX_ROPE:
        raise InvariantViolated(f"latents of {rank} + {width - rank} are beyond {MAX_RANK} + {MAX_ROPE}")
    if q.stride(2) != 1 or pool.stride(3) != 1:
        raise InvariantViolated("the numbers of one row must be adjacent in memory")
    check_layer(heads, window, chunk, sinks)
