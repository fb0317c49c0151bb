"""What the kernels must compute, in plain torch: slow, obvious, in fp32 whatever the pool's dtype is."""

from __future__ import annotations

import torch

from services.worker.engine.forward_meta import PagedTensors


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    paged: PagedTensors,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As ``services.worker.kernels.paged_attention``, row by row, fp32 ``[T, heads, head_dim]``."""
    page_size = k_pool.shape[1]
    group = q.shape[1] // k_pool.shape[2]
    edges, contexts = paged.cu_rows.tolist(), paged.context.tolist()
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for segment, context in enumerate(contexts):
        for row in range(edges[segment], edges[segment + 1]):
            position = context + row - edges[segment]
            first = 0 if window is None else max(0, position - window + 1)
            keys = torch.arange(first, position + 1, device=q.device)
            pages = paged.page_table[segment][keys // page_size].long()
            key = k_pool[pages, keys % page_size].float().repeat_interleave(group, dim=1)
            value = v_pool[pages, keys % page_size].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[row].float(), key) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), value)
    return out


def kv_write(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """As ``services.worker.kernels.kv_write``, row by row."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_pool.shape[1])
            k_pool[page, offset] = k[row]
            v_pool[page, offset] = v[row]
