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
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
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
            if chunk is not None:
                first = position // chunk * chunk
            keys = torch.arange(first, position + 1, device=q.device)
            pages = paged.page_table[segment][keys // page_size].long()
            key = k_pool[pages, keys % page_size].float().repeat_interleave(group, dim=1)
            value = v_pool[pages, keys % page_size].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[row].float(), key) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:  # A key that all rows see, whose value is zero.
                scores = torch.cat([scores, sinks.float()[:, None]], dim=1)
                value = torch.cat([value, torch.zeros_like(value[:1])])
            out[row] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), value)
    return out


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
    """As ``services.worker.kernels.latent_attention``, row by row in float64, of q's dtype ``[T, heads, rank]``."""
    edges, contexts = paged.cu_rows.tolist(), paged.context.tolist()
    out = torch.empty((*q.shape[:2], rank), dtype=torch.float64, device=q.device)
    for segment, context in enumerate(contexts):
        for row in range(edges[segment], edges[segment + 1]):
            position = context + row - edges[segment]
            keys = torch.arange(position + 1, device=q.device)
            if window is not None:
                keys = keys[keys > position - window]
            if chunk is not None:
                keys = keys[keys // chunk == position // chunk]
            pages = paged.page_table[segment][keys // pool.shape[1]].long()
            kept = pool[pages, keys % pool.shape[1], 0].double()
            scores = q[row].double() @ kept.T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            out[row] = torch.softmax(scores, dim=-1)[:, : len(keys)] @ kept[:, :rank]
    return out.to(q.dtype)


def latent_write(rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """As ``services.worker.kernels.latent_write``, row by row."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, pool.shape[1])
            pool[page, offset] = rows[row]


def kv_write(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """As ``services.worker.kernels.kv_write``, row by row."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_pool.shape[1])
            k_pool[page, offset] = k[row]
            v_pool[page, offset] = v[row]


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """As ``services.worker.kernels.add_rms_norm``, as Hugging Face's modules do it."""
    if delta is not None:
        x += delta
    out.copy_(_rms_norm(x, weight, eps))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``services.worker.kernels.silu_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


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
    """As ``services.worker.kernels.rope_write``, as Hugging Face's modules do it and :func:`kv_write` writes it."""
    query_heads, kv_heads = heads
    parts = qkv.view(len(qkv), -1, 2 * cosines.shape[1])
    queries, keys = parts[:, :query_heads], parts[:, query_heads : query_heads + kv_heads]
    values = parts[:, query_heads + kv_heads :]
    cos, sin = (torch.cat([table[positions]] * 2, dim=-1)[:, None] for table in (cosines, sines))
    found = []
    for each, weight in zip((queries, keys), (None, None) if norms is None else norms[:2], strict=True):
        normed = each if norms is None or weight is None else _rms_norm(each, weight, norms[2])
        low, high = normed.chunk(2, dim=-1)
        found.append(normed * cos + torch.cat([-high, low], dim=-1) * sin)
    queries.copy_(found[0])
    keys.copy_(found[1])
    if pool is not None:
        kv_write(found[1], values, *pool)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    numbers = x.float()
    return weight * (numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
