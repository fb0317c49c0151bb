"""Attention over the paged pool on a CPU, request by request.

Where there is a C compiler, decode and prefill are computed by kernels of their own
(:mod:`services.worker.native.decode`, :mod:`services.worker.native.extend`), which read the pages in
place. What follows is the portable path: for machines without one, for float16, and for soft-capped scores.
Sinks (``AttentionCall.sinks``) enter the sum of a row's weights, here and there.

The query heads of one KV head (a GQA group) share its keys. In decode they are packed as query rows, so one pass
over the keys serves the whole group; in prefill the keys are expanded over the group with stride 0, which copies
nothing. Keys in consecutive slots are read in place; others are gathered, page by page, into one reused buffer.

The causal and sliding-window rules depend only on key position minus row position, so a mask is a Toeplitz
matrix: one vector seen with strides (1, 1) while the query rows are in reverse order. It stays in the first-level
cache however long the context is, where a real matrix of a block would be 100 MiB at 128k tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engine.attention import AttentionCall
from services.worker.engine.attention_plan import BLOCK_ROWS, AttentionPlan, QueryBlock, plan_attention
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.native_work import find_decode_work, find_extend_work
from services.worker.kv.device_pool import TORCH_DTYPES, kept_as
from services.worker.kv.float8 import from_float8, rounded
from services.worker.native.decode import DecodeWork, NativeDecode, compile_decode
from services.worker.native.extend import ExtendWork, NativeExtend, compile_extend
from shared.messages.pools import KvGeometry


class HeadShape(NamedTuple):
    """The heads of one layer: ``kv_heads`` KV heads of ``head_dim`` values, with ``group`` query heads to each.

    Slots of the pool are ``slot`` values apart.
    """

    kv_heads: int
    group: int
    head_dim: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Portable:
    """The part of a step that the portable path computes. ``gather_pages`` int64: those of the plan, as a tensor."""

    plan: AttentionPlan
    gather_pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """One step for layers of one kind, by what computes it: segments of a single row, longer ones, and the rest."""

    decode: tuple[NativeDecode, DecodeWork] | None = None
    extend: tuple[NativeExtend, ExtendWork] | None = None
    portable: _Portable | None = None


class KvPages(Protocol):
    """K and V by layer (or part), laid out as in ``DevicePool``."""

    geometry: KvGeometry

    def k(self, layer: int, /) -> torch.Tensor:
        """Return K of a layer or part, ``[pages, page_size, kv_heads, head_dim]``."""

    def v(self, layer: int, /) -> torch.Tensor:
        """Return V of a layer or part, shaped like its K."""


class CpuAttention:
    """The backend of :class:`~services.worker.engine.paged_step.PagedStep` for CPUs. Steps share its buffers."""

    def __init__(self, pool: KvPages, *, packs_single_rows: bool = False, dtype: torch.dtype = torch.float32) -> None:
        """Attend over ``pool``; if ``packs_single_rows``, prefill's kernel takes single rows too.

        That kernel packs keys first, and then computes a query head faster, so this pays where very many of them share
        a KV head. Over rounded K and V it always takes single rows: the two kernels differ in last bits, by which a
        value may be rounded to another code. ``dtype`` is that of queries over a rounded pool; over others it is the
        pool's.
        """
        self._pool = pool
        self._packs_single_rows = packs_single_rows or pool.geometry.is_rounded
        self._is_rounded = pool.geometry.is_rounded
        self._dtype = TORCH_DTYPES.get(pool.geometry.dtype, dtype)
        self._gathered = torch.empty(0, dtype=kept_as(pool.geometry)[0])
        self._bands: dict[int | None, torch.Tensor] = {}
        self._native: dict[HeadShape, tuple[NativeDecode | None, NativeExtend | None]] = {}

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        """Return the attention of one step.

        It plans each kind of layer (window, chunk, heads) at its first layer.
        """
        plans: dict[tuple[int | None, int | None, bool, bool, HeadShape], _StepPlan] = {}

        def attend(call: AttentionCall) -> torch.Tensor:
            shape = self._shape(call.layer, call.query.shape[1])
            kind = call.window, call.chunk, call.softcap is None, call.sinks is None, shape
            if kind not in plans:  # Once per step and kind of layer.
                plans[kind] = self._plan(meta, call, shape)
            return self._attend(plans[kind], call)

        return attend

    def _shape(self, layer: int, query_heads: int) -> HeadShape:
        k_pool = self._pool.k(layer)
        _, _, kv_heads, width = k_pool.shape
        head_dim = self._pool.geometry.head_dim if self._is_rounded else width
        return HeadShape(kv_heads, query_heads // kv_heads, head_dim, k_pool.stride(1))

    def _plan(self, meta: ForwardMeta, call: AttentionCall, shape: HeadShape) -> _StepPlan:
        decode, extend = self._kernels(shape) if call.softcap is None else (None, None)
        least = 1 if self._packs_single_rows and extend is not None else 2
        short = None if decode is None or least == 1 else find_decode_work(meta, call.window, call.chunk)
        long = (
            None
            if extend is None
            else find_extend_work(meta, call.window, shape.group, shape.kv_heads, call.chunk, least)
        )
        return _StepPlan(
            None if decode is None or short is None else (decode, short),
            None if extend is None or long is None else (extend, long),
            None if extend is not None else self._plan_portably(meta, call, single_rows=decode is None),
        )

    def _plan_portably(self, meta: ForwardMeta, call: AttentionCall, *, single_rows: bool) -> _Portable | None:
        is_plain = call.softcap is None and call.sinks is None
        plan = plan_attention(meta, call.window, call.chunk, whole_prompts=is_plain, single_rows=single_rows)
        if not plan.segments:
            return None
        return _Portable(plan, torch.from_numpy(plan.gather_pages))

    def kernels(self, query_heads: int) -> tuple[NativeDecode | None, NativeExtend | None]:
        """Return the kernels for decode and for prefill that could be compiled for the first layer's heads.

        A kernel that could not is None. The second is never there without the first, nor the first alone where K and V
        are rounded.
        """
        return self._kernels(self._shape(0, query_heads))

    def _kernels(self, shape: HeadShape) -> tuple[NativeDecode | None, NativeExtend | None]:
        if shape not in self._native:
            geometry = msgspec.structs.replace(self._pool.geometry, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
            decode = extend = None
            if not self._is_rounded:
                decode = compile_decode(geometry, shape.kv_heads * shape.group, shape.slot)
            if self._is_rounded or decode is not None:
                extend = compile_extend(shape.head_dim, shape.group, self._dtype, is_rounded=self._is_rounded)
            self._native[shape] = decode, extend
        return self._native[shape]

    def _attend(self, step: _StepPlan, call: AttentionCall) -> torch.Tensor:
        heads, rows, head_dim = call.query.shape[1:]
        output = torch.empty(rows, heads, head_dim, dtype=self._dtype)
        k_pool, v_pool = self._pool.k(call.layer), self._pool.v(call.layer)
        if step.decode is not None:
            decode, short = step.decode
            decode.attend(short, call.query[0], k_pool, v_pool, output, call.scaling, call.sinks)
        if step.extend is not None:
            extend, long = step.extend
            extend.attend(long, call.query[0], k_pool, v_pool, output, call.scaling, call.sinks)
        if step.portable is not None:
            self._attend_portably(step.portable, call, output)
        return output

    def _attend_portably(self, step: _Portable, call: AttentionCall, output: torch.Tensor) -> None:
        """Write the rows of ``step`` into ``output`` [T, heads, head_dim]."""
        k_pool, v_pool = self._pool.k(call.layer), self._pool.v(call.layer)
        kv_heads = k_pool.shape[2]
        heads, rows, head_dim = call.query.shape[1:]
        group = heads // kv_heads
        halves = [pool.flatten(0, 1).transpose(0, 1) for pool in (k_pool, v_pool)]
        gathered = self._gather(k_pool, v_pool, step.gather_pages)
        query = call.query.reshape(kv_heads, group, rows, head_dim)
        result = output.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        for segment in step.plan.segments:
            end = segment.first + segment.keys
            if segment.source == "batch":
                key, value = call.key[0, :, segment.first : end], call.value[0, :, segment.first : end]
                if self._is_rounded:  # Later readers of these tokens get them rounded, too.
                    key, value = rounded(key), rounded(value)
            else:
                source = halves if segment.source == "pool" else gathered
                key, value = source[0][:, segment.first : end], source[1][:, segment.first : end]
                if self._is_rounded:
                    key, value = (from_float8(half, head_dim, self._dtype) for half in (key, value))
            for block in segment.blocks:
                self._attend_block(block, query, key, value, result, call)

    def _attend_block(
        self,
        block: QueryBlock,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        """Write the attention of one block into ``result``.

        Query and result are [kv_heads, group, T, head_dim], key and value [kv_heads, keys, head_dim].
        """
        rows = query[:, :, block.row_start : block.row_end]
        into = result[:, :, block.row_start : block.row_end]
        kv_heads, group, count, head_dim = rows.shape
        if block.key_end - block.key_start < key.shape[1]:
            key, value = key[:, block.key_start : block.key_end], value[:, block.key_start : block.key_end]
        core = _core(call, kv_heads, count)
        key, value = key[:, None], value[:, None]
        if block.mask == "none":
            packed = rows.reshape(kv_heads, 1, group * count, head_dim)
            into.copy_(core(packed, key, value, scale=call.scaling).view(rows.shape))
            return
        key = key.expand(kv_heads, group, -1, head_dim)
        value = value.expand(kv_heads, group, -1, head_dim)
        if block.mask == "triangle":
            into.copy_(core(rows, key, value, is_causal=True, scale=call.scaling))
            return
        mask = self._mask(call.window, count, key.shape[2], block.diagonal)
        into.copy_(core(rows.flip(2), key, value, attn_mask=mask, scale=call.scaling).flip(2))

    def _gather(
        self, k_pool: torch.Tensor, v_pool: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of ``pages`` as the pool holds them, ``[kv_heads, gathered slots, head_dim]`` each."""
        shape = (2, len(pages), *k_pool.shape[1:])
        size = math.prod(shape)
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size * 3 // 2, dtype=k_pool.dtype)
        into = self._gathered[:size].view(shape)
        for pool, half in zip((k_pool, v_pool), into, strict=True):
            if len(pages):
                torch.index_select(pool, 0, pages, out=half)
        key, value = into.flatten(1, 2).transpose(1, 2)
        return key, value

    def _mask(self, window: int | None, rows: int, keys: int, diagonal: int) -> torch.Tensor:
        """Return the additive mask ``[rows, keys]`` for query rows in reverse order.

        Entry (r, j) belongs to row ``rows - 1 - r`` at key ``diagonal + rows - 1 - r``, and is ``band[j - that]``.
        """
        band = self._bands.get(window)
        if band is None or len(band) <= keys + BLOCK_ROWS:
            reach = max(4096, 2 * keys)
            distance = torch.arange(-reach, BLOCK_ROWS + 1)
            seen = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
            band = torch.full(distance.shape, float("-inf"), dtype=self._dtype).masked_fill_(seen, 0.0)
            self._bands[window] = band
        zero = len(band) - BLOCK_ROWS - 1  # Where distance 0 lies.
        return band.as_strided((rows, keys), (1, 1), zero - diagonal - rows + 1)


def _core(call: AttentionCall, kv_heads: int, rows: int) -> Callable[..., torch.Tensor]:
    """Return what attends in a block of ``rows`` rows.

    It is torch's own function; with soft-capped scores (Gemma 2, arXiv 2408.00118 section 2) or sinks, which torch's
    kernels for CPUs lack, it is one that is written out.
    """
    if call.softcap is None and call.sinks is None:
        return scaled_dot_product_attention
    sinks = None
    if call.sinks is not None:
        sinks = call.sinks.float().view(kv_heads, -1, 1).repeat_interleave(rows, dim=1)
    return _written_out(call.softcap, sinks)


def _written_out(softcap: float | None, sinks: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Return attention in plain products, with soft-capping and sinks float32 [kv_heads, group * rows, 1]."""

    def core(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv_heads, group, rows, head_dim = query.shape
        # Packing the group as rows keeps matmul from copying the keys once for each query head.
        packed = query.reshape(kv_heads, group * rows, head_dim)
        scores = torch.bmm(packed, key[:, 0].transpose(1, 2))
        if softcap is None:
            scores.mul_(scale)
        else:
            scores.mul_(scale / softcap).tanh_().mul_(softcap)
        if attn_mask is not None:
            scores.view(kv_heads, group, rows, -1).add_(attn_mask)
        if sinks is None:
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        else:
            weights = torch.softmax(torch.cat([scores.float(), sinks], dim=-1), dim=-1)[..., :-1]
        return torch.bmm(weights.to(query.dtype), value[:, 0]).view(query.shape)

    return core
