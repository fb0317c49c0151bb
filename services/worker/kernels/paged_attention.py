"""Attention of one step over the paged pool: decode rows and prefill chunks in one flattened batch."""

from __future__ import annotations

import torch

from services.worker.engine.forward_meta import PagedTensors
from services.worker.engine.kernel_limits import MAX_HEAD_DIM
from services.worker.kernels.block_sizes import block_sizes
from services.worker.kernels.decode import decode
from services.worker.kernels.extend import extend
from services.worker.kernels.float8 import kept_width
from services.worker.kernels.layer_checks import check_layer
from shared.errors import InvariantViolated


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
    """Return the attention output ``[T, heads, head_dim]``, contiguous, of q's dtype (fp32, bf16 or fp16).

    q [T, heads, head_dim], any strides but for the last, which is 1; k_pool and v_pool [pages, page_size, kv_heads,
    head_dim], or of bytes, head_bytes, where they are rounded, alike in strides, which hold the step's own K and V
    already. Row i of a segment is at position ``context + i`` and sees keys ``j <= position``, with a window only ``j >
    position - window``, with a chunk only those of its own; with a softcap c, scores s become ``c * tanh(s / c)``.
    sinks [heads], of any dtype, are one more score of each head, whose value is zero. Nothing here waits for the
    device. Raises InvariantViolated for shapes that do not belong together.
    """
    check_attention(q, k_pool, v_pool, window, chunk, sinks)
    heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    is_rounded = k_pool.dtype == torch.uint8
    sizes = block_sizes(head_dim, heads // k_pool.shape[2], q.element_size(), is_rounded=is_rounded)
    tables = (paged.cu_rows, paged.context, paged.page_table)
    # A mixed step runs both kernels; each leaves the other's segments at once.
    if paged.max_rows > 1:
        extend(
            q, k_pool, v_pool, out, *tables,
            max_rows=paged.max_rows, scaling=scaling, window=window, softcap=softcap, chunk=chunk, sinks=sinks,
            sizes=sizes,
        )  # fmt: skip
    if paged.max_rows == 1 or len(paged.context) > 1:
        decode(
            q, k_pool, v_pool, out, *tables, paged.shared,
            max_length=paged.max_length, scaling=scaling, window=window, softcap=softcap, chunk=chunk, sinks=sinks,
            sizes=sizes,
        )  # fmt: skip
    return out


def check_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    window: int | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise InvariantViolated for shapes that do not belong together."""
    heads, head_dim = q.shape[1:]
    kv_heads = k_pool.shape[2]
    are_alike = k_pool.shape == v_pool.shape and k_pool.stride() == v_pool.stride()
    if not are_alike or k_pool.dtype != v_pool.dtype or k_pool.dtype not in (q.dtype, torch.uint8):
        raise InvariantViolated(f"q {q.dtype}, K {k_pool.shape} and V {v_pool.shape} do not belong together")
    if k_pool.shape[3] != kept_width(k_pool, head_dim) or heads % kv_heads or not 0 < head_dim <= MAX_HEAD_DIM:
        raise InvariantViolated(f"{heads} heads of {head_dim} cannot attend to {kv_heads} of {k_pool.shape[3]}")
    if q.stride(2) != 1 or k_pool.stride(3) != 1:
        raise InvariantViolated("the numbers of one head must be adjacent in memory")
    check_layer(heads, window, chunk, sinks)
