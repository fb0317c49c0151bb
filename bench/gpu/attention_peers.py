"""The same attention by other means: PyTorch's SDPA over contiguous KV, and FlexAttention over pages.

A problem is ``batch`` requests, each with ``rows`` new tokens behind ``context`` others, of one layer. All means have
the same numbers: ours in pages anywhere in a pool, SDPA's gathered from there into one piece a request, FlexAttention's
in pages of its own size, which is that of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engine.forward_meta import PagedTensors

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer."""

    name: str
    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Problem:
    """One measurement. ``page_size`` is that of our pool."""

    heads: Heads
    batch: int
    context: int
    rows: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def length(self) -> int:
        return self.context + self.rows

    @property
    def kv_bytes(self) -> int:
        """K and V that must be read once."""
        return self.batch * self.length * 2 * self.heads.kv * self.heads.dim * self.dtype.itemsize

    @property
    def flop(self) -> float:
        """Of both products, over the keys that rows see."""
        visible = self.rows * (self.context + (self.rows + 1) / 2)
        return 4.0 * self.batch * self.heads.query * self.heads.dim * visible

    @cached_property
    def _random(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    def _normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.empty(shape, device=self.device, dtype=self.dtype)
        return drawn.normal_(generator=self._random)

    @cached_property
    def query(self) -> torch.Tensor:
        """[batch, heads, rows, dim]."""
        return self._normal(self.batch, self.heads.query, self.rows, self.heads.dim)

    @cached_property
    def pool(self) -> torch.Tensor:
        """[2, pages, page_size, kv_heads, dim]: the pages of all requests and no others."""
        return self._normal(2, self.table.numel(), self.page_size, self.heads.kv, self.heads.dim)

    @cached_property
    def table(self) -> torch.Tensor:
        """int64 [batch, pages of a request], a permutation."""
        pages = -(-self.length // self.page_size)
        order = torch.randperm(self.batch * pages, generator=self._random, device=self.device)
        return order.view(self.batch, pages)

    @cached_property
    def paged(self) -> PagedTensors:
        edges = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.rows
        context = torch.full((self.batch,), self.context, dtype=torch.int32, device=self.device)
        return PagedTensors(edges, context, self.table.int(), self.rows, self.length)

    def gathered(self) -> torch.Tensor:
        """K and V in one piece a request, [2, batch, kv_heads, length, dim]."""
        rows = self.pool[:, self.table].flatten(2, 3)[:, :, : self.length]
        return rows.transpose(2, 3)


def ours(problem: Problem) -> Attend:
    """The kernels that serve: Triton, over pages. The result is [batch, heads, rows, dim], as all of them."""
    from services.worker.kernels import paged_attention

    batch, heads, rows, dim = problem.query.shape
    flat = problem.query.transpose(1, 2).reshape(batch * rows, heads, dim)
    k_pool, v_pool = problem.pool[0], problem.pool[1]

    def attend() -> torch.Tensor:
        output = paged_attention(flat, k_pool, v_pool, problem.paged, scaling=dim**-0.5)
        return output.view(batch, rows, heads, dim).transpose(1, 2)

    return attend


def sdpa(problem: Problem, kv: torch.Tensor) -> Attend:
    """PyTorch's own choice of kernel, over KV that lies in one piece already."""
    is_prompt = problem.context == 0 and problem.rows > 1
    bias = None
    if problem.context and problem.rows > 1:
        bias = causal_lower_right(problem.rows, problem.length)
    key, value = kv[0], kv[1]
    if bias is not None:  # This mask's kernels want as many heads of K as of Q.
        group = problem.heads.query // problem.heads.kv
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(
            problem.query, key, value, attn_mask=bias, is_causal=is_prompt, enable_gqa=bias is None
        )

    return attend


def gathering_sdpa(problem: Problem) -> Attend:
    """What SDPA costs over a paged pool: gather first."""
    return lambda: sdpa(problem, problem.gathered())()


def flex(problem: Problem, block: int, *, is_compiled: bool) -> Attend:
    """FlexAttention with a block mask that names pages of ``block`` tokens. Raises whatever PyTorch's experimental
    paged attention raises where this version of it has none.
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads, batch, length, device = problem.heads, problem.batch, problem.length, problem.device
    pages = -(-length // block)
    paged: Any = PagedAttention(batch * pages, block, batch, device=device.type)
    cache = torch.zeros(2, 1, heads.kv, batch * pages * block, heads.dim, dtype=problem.dtype, device=device)
    numbers = torch.arange(batch, device=device)
    for number in range(batch):
        paged.reserve(numbers[number], torch.tensor(length, device=device))
    positions = torch.arange(length, device=device).expand(batch, -1)
    kv = problem.gathered()
    paged.assign(numbers, positions, kv[0], kv[1], cache[0], cache[1])
    before = torch.full((batch,), problem.context, device=device)

    def is_seen(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= row + before[b]

    mask = create_block_mask(
        is_seen, batch, None, problem.rows, pages * block, device=device.type, BLOCK_SIZE=block
    )  # fmt: skip
    lengths = torch.full((batch,), length, device=device)
    physical = paged.convert_logical_block_mask(mask, kv_len=lengths)
    attention: Any = torch.compile(flex_attention, dynamic=False) if is_compiled else flex_attention

    def attend() -> torch.Tensor:
        # K and V are one sequence that all requests share: the mask says whose its blocks are.
        output: torch.Tensor = attention(problem.query, cache[0], cache[1], block_mask=physical, enable_gqa=True)
        return output

    return attend
