"""One block of keys against a tile of query rows, accumulated with a running maximum (online softmax).

The recurrence is that of FlashAttention (Dao et al., arXiv 2205.14135, section 3.1), in base 2, because the hardware
has ``exp2``. Attention kernels are loops over this function; the bounds of the keys that a row sees and the effect of a
sink are here, too, so that all kernels agree.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.kernels.float8 import load_heads

# How the keys of a row are bounded: by nothing but itself, by a sliding window, by the start of its own chunk.
UNBOUNDED = 0
WINDOW = 1
CHUNK = 2


def bound_of(window: int | None, chunk: int | None) -> tuple[int, int]:
    """Return the kind of bound of a layer, and its number of keys: the arguments BOUND and ``reach`` of kernels."""
    if chunk is not None:
        return CHUNK, chunk
    return (UNBOUNDED, 0) if window is None else (WINDOW, window)


@triton.jit
def first_visible(position, reach, BOUND: tl.constexpr):
    """Return the first key that a row at ``position`` sees, as ``services.worker.engine.visibility`` does."""
    first = position - position
    if BOUND == 1:
        first = tl.maximum(first, position - reach + 1)
    if BOUND == 2:
        first = position - position % reach
    return first


@triton.jit
def sunk(mean, lse, sink):
    """Return ``mean`` after a ``sink`` of no value has taken its part of the weights.

    ``mean`` is of values whose weights sum to 2**lse. ``sink`` is an unscaled score; a sink far above all others
    overflows, and leaves 0.
    """
    return mean / (1.0 + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - lse))


@triton.jit
def weigh(scores, row_max, visible, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the weights [M, N] of one block of keys, the decay [M] of sums before it, and the new row_max [M].

    scores [M, N] are scaled. ``visible`` and ``row_max`` are those of :func:`attend_keys`.
    """
    if HAS_SOFTCAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is no number.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    return weights, decay, new_max


@triton.jit
def attend_keys(
    query,
    total,
    row_max,
    row_sum,
    k_head,
    v_head,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the new (total, row_max, row_sum) after one block of keys.

    query [M, BLOCK_D]; total fp32 [M, BLOCK_D]; row_max (of base-2 scores) and row_sum fp32 [M]. ``k_head`` and
    ``v_head`` point at this KV head of page 0; ``table`` at the request's page table. keys [N] are positions;
    ``exists`` [N] says which may be read, ``visible`` [M, N] which a row may see.
    """
    pages = tl.load(table + keys // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    slots = pages * stride_page + (keys % PAGE_SIZE) * stride_slot
    dims = tl.arange(0, BLOCK_D)
    offsets = slots[:, None] + dims[None, :]
    readable = exists[:, None] & (dims[None, :] < HEAD_DIM)
    key = load_heads(k_head, slots, offsets, exists, readable, HEAD_DIM, query.dtype)
    # "ieee" keeps fp32 exact; on 16-bit types it changes nothing.
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    weights, decay, new_max = weigh(scores, row_max, visible, softcap, HAS_SOFTCAP)
    value = load_heads(v_head, slots, offsets, exists, readable, HEAD_DIM, query.dtype)
    total = total * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return total, new_max, row_sum * decay + tl.sum(weights, 1)
