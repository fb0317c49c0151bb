"""Batches for tests of attention: random Q, a pool with shuffled pages, and the tables that name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.forward_meta import PagedTensors

TABLES = ("cu_rows", "context", "page_table", "max_rows", "max_length")
"""Fields of ``PagedTensors`` that every kernel takes."""


@dataclass(frozen=True)
class Shape:
    """``segments`` are (rows, context) pairs."""

    segments: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    paged: PagedTensors

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"q": self.q, "k_pool": self.k_pool, "v_pool": self.v_pool}

    @property
    def tables(self) -> dict[str, Any]:
        return {name: getattr(self.paged, name) for name in TABLES}


def make_batch(shape: Shape, *, seed: int = 0, device: str = "cpu") -> Batch:
    """Slots that no token of the batch fills hold NaN: whoever reads one is found out."""
    random = torch.Generator().manual_seed(seed)
    lengths = [rows + context for rows, context in shape.segments]
    counts = [-(-length // shape.page_size) for length in lengths]
    pages = sum(counts) + 3
    order = torch.randperm(pages, generator=random)
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    pools = []
    for _ in range(2):
        pool = torch.full((pages, shape.page_size, shape.kv_heads, shape.head_dim), float("nan"))
        taken = 0
        for segment, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            mine = order[taken : taken + count]
            table[segment, :count] = mine.int()
            rows = torch.full((count * shape.page_size, shape.kv_heads, shape.head_dim), float("nan"))
            rows[:length] = torch.randn(length, shape.kv_heads, shape.head_dim, generator=random)
            pool[mine] = rows.view(count, shape.page_size, shape.kv_heads, shape.head_dim)
            taken += count
        pools.append(pool.to(shape.dtype).to(device))
    total = sum(rows for rows, _ in shape.segments)
    # Models hand over Q as [heads, T, head_dim], transposed.
    q = torch.randn(shape.heads, total, shape.head_dim, generator=random).to(shape.dtype).to(device).transpose(0, 1)
    cu_rows = torch.tensor([0, *[rows for rows, _ in shape.segments]]).cumsum(0).int()
    paged = PagedTensors(
        cu_rows=cu_rows.to(device),
        context=torch.tensor([context for _, context in shape.segments], dtype=torch.int32, device=device),
        page_table=table.to(device),
        max_rows=max(rows for rows, _ in shape.segments),
        max_length=max(lengths),
    )
    return Batch(q, pools[0], pools[1], paged)
