"""Calls of host functions whose kernels are compiled for every architecture. A new kernel is a call more in ``CASES``.

Tensors lie in main memory and nothing reads them: shapes, strides, data types and alignment decide what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from services.worker.engine.forward_meta import Segment, paged_tensors
from services.worker.kernels import (
    add_rms_norm,
    kv_write,
    latent_attention,
    latent_write,
    page_gather,
    paged_attention,
    rope_write,
    silu_mul,
)
from services.worker.kernels.add_one import add_one
from services.worker.kernels.exact.attention import paged_attention as exact_attention
from services.worker.kernels.exact.matmul import matmul
from services.worker.kernels.exact.rows import layer_norm, log_softmax, mean
from services.worker.kernels.row_checksums import check_rows, constants_on, sums_for
from services.worker.kv.float8 import to_float8
from services.worker.kv.page_memory import PageLayout
from shared.messages.pools import KvGeometry

SHARED_BYTES: ContextVar[int] = ContextVar("shared_bytes", default=0)
"""Shared memory of the architecture that is compiled for, by which host code chooses."""

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def attention(
    attend: Callable[..., object],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    *,
    has_sinks: bool = False,
    is_rounded: bool = False,
) -> None:
    """A prompt beside a long decode, and a short decode alone: both kernels, with and without joined splits."""
    pool = _pool(dtype, 4, page_size, kv_heads, head_dim, is_rounded=is_rounded)
    table = np.zeros(8192, dtype=np.int32)
    for segments in ([Segment(100, 28, table), Segment(1, 8000, table)], [Segment(1, 99, table)]):
        rows = sum(segment.rows for segment in segments)
        # As rotary embeddings leave it: [1, heads, T, head_dim].
        query = torch.empty((1, heads, rows, head_dim), dtype=dtype)[0].transpose(0, 1)
        paged = paged_tensors(segments, page_size, CPU)
        sinks = torch.empty(heads, dtype=dtype) if has_sinks else None
        attend(query, pool, pool, paged, scaling=0.1, window=window, softcap=softcap, chunk=chunk, sinks=sinks)


def _pool(
    dtype: torch.dtype, pages: int, page_size: int, kv_heads: int, head_dim: int, *, is_rounded: bool
) -> torch.Tensor:
    pool = torch.empty((pages, page_size, kv_heads, head_dim), dtype=dtype)
    return to_float8(pool) if is_rounded else pool


def shared_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int, *, is_rounded: bool = False
) -> None:
    """Decode rows behind one document, which is read once for all of them."""
    pool = _pool(dtype, 4, page_size, kv_heads, head_dim, is_rounded=is_rounded)
    table = np.zeros(8192, dtype=np.int32)
    segments = [Segment(1, context, table) for context in (8000, 8100, 8191, 8050)]
    query = torch.empty((1, heads, len(segments), head_dim), dtype=dtype)[0].transpose(0, 1)
    paged = paged_tensors(segments, page_size, CPU)
    paged_attention(query, pool, pool, paged, scaling=0.1, window=None, softcap=None)


def latents(
    dtype: torch.dtype,
    heads: int,
    rank: int,
    rope: int,
    page_size: int,
    window: int | None = None,
    softcap: float | None = None,
    *,
    has_sinks: bool = False,
) -> None:
    """A prompt beside a long decode, and a short decode alone, over planes wider than rows; then rows are written."""
    width = rank + rope
    plane = torch.empty((4, page_size, width + 64), dtype=dtype)
    pool = plane.as_strided((4, page_size, 1, width), (plane.stride(0), plane.stride(1), width, 1))
    table = np.zeros(8192, dtype=np.int32)
    for segments in ([Segment(100, 28, table), Segment(1, 8000, table)], [Segment(1, 99, table)]):
        rows = sum(segment.rows for segment in segments)
        query = torch.empty((1, heads, rows, width), dtype=dtype)[0].transpose(0, 1)
        sinks = torch.empty(heads, dtype=dtype) if has_sinks else None
        paged = paged_tensors(segments, page_size, CPU)
        latent_attention(query, pool, paged, rank=rank, scaling=0.1, window=window, softcap=softcap, sinks=sinks)
    latent_write(torch.empty((3, 1, width), dtype=dtype), pool, torch.zeros(3, dtype=torch.int64))


def write(dtype: torch.dtype, kv_heads: int, head_dim: int, *, is_rounded: bool = False) -> None:
    """K and V of a step's rows, written into the pool."""
    rows = torch.empty((3, kv_heads, head_dim), dtype=dtype)
    pool = _pool(dtype, 4, 16, kv_heads, head_dim, is_rounded=is_rounded)
    kv_write(rows, rows, pool, pool, torch.zeros(3, dtype=torch.int64))


def move(dtype: str, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Pages up to the device and down again."""
    geometry = KvGeometry(layers=32, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    numbers = torch.zeros((2, 3), dtype=torch.int32)
    host, device = PageLayout.page_first(geometry, 64), PageLayout.layer_first(geometry, 64)
    with patch.object(page_gather, "_shared_bytes", return_value=SHARED_BYTES.get()):
        for begin, end in ((host, device), (device, host)):
            page_gather.copy_pages(memory, begin, memory, end, numbers, range(32), programs=2)


def check(kv_heads: int, head_dim: int, page_size: int) -> None:
    """Checksums of rows that were loaded."""
    geometry = KvGeometry(layers=32, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16")
    layout = PageLayout.layer_first(geometry, 4)
    pool = torch.zeros(layout.nbytes, dtype=torch.uint8)
    pages, seeds = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    check_rows(
        pool, layout, 0, pages, seeds, seeds, torch.zeros(3, dtype=torch.uint8),
        constants=constants_on(CPU), sums=sums_for(layout.half_bytes, 3, CPU),
    )  # fmt: skip


def norm(dtype: torch.dtype, width: int) -> None:
    """With an addition and without."""
    x, weight = torch.empty((3, width), dtype=dtype), torch.empty(width, dtype=dtype)
    for delta in (None, torch.empty_like(x)):
        add_rms_norm(x, delta, weight, 1e-5, torch.empty_like(x))


def gate(dtype: torch.dtype, width: int) -> None:
    silu_mul(torch.empty((3, 2 * width), dtype=dtype))


def rotate(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, *, is_rounded: bool = False) -> None:
    """With norms and without, into the pool and not."""
    qkv = torch.empty((3, (heads + 2 * kv_heads) * head_dim), dtype=dtype)
    angles, weight = torch.empty((64, head_dim // 2), dtype=dtype), torch.empty(head_dim, dtype=dtype)
    pool = _pool(dtype, 4, 16, kv_heads, head_dim, is_rounded=is_rounded)
    positions = torch.zeros(3, dtype=torch.int64)
    for norms in (None, (weight, weight, 1e-6)):
        for into in (None, (pool, pool, positions)):
            rope_write(qkv, positions, angles, angles, into, heads=(heads, kv_heads), norms=norms)


def exact_products(dtype: torch.dtype, depth: int, columns: int) -> None:
    """With a bias and without."""
    x, weight = torch.empty((3, depth), dtype=dtype), torch.empty((columns, depth), dtype=dtype)
    for bias in (None, torch.empty(columns, dtype=dtype)):
        matmul(x, weight, bias)


def exact_rows(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.empty((3, width), dtype=dtype), torch.empty(width, dtype=dtype)
    mean(x)
    layer_norm(x, weight, weight, 1e-5)
    log_softmax(x, torch.float32)


CASES: dict[str, Callable[[], None]] = {
    "add one": partial(add_one, torch.empty(300, dtype=torch.int32), torch.empty(300, dtype=torch.int32)),
    # Llama-3.1-8B; Llama-3.2-1B; Llama-3.1-70B and Qwen3-32B; Llama-2-7B; one of tensor-parallel ranks.
    "attention bf16 32/8x128 page 16": partial(attention, paged_attention, BF16, 32, 8, 128, 16),
    "attention bf16 32/8x64 page 16": partial(attention, paged_attention, BF16, 32, 8, 64, 16),
    "attention bf16 64/8x128 page 16": partial(attention, paged_attention, BF16, 64, 8, 128, 16),
    "attention bf16 32/32x128 page 16": partial(attention, paged_attention, BF16, 32, 32, 128, 16),
    "attention bf16 8/1x128 page 16": partial(attention, paged_attention, BF16, 8, 1, 128, 16),
    # Gemma 2: windows and soft caps.
    "attention bf16 8/4x256 page 64, window, softcap": partial(
        attention, paged_attention, BF16, 8, 4, 256, 64, 4096, 50.0
    ),
    # gpt-oss: sinks. Llama 4 Scout: chunks.
    "attention bf16 64/8x64 page 16, sinks": partial(attention, paged_attention, BF16, 64, 8, 64, 16, has_sinks=True),
    "attention bf16 40/8x128 page 16, chunk": partial(
        attention, paged_attention, BF16, 40, 8, 128, 16, None, None, 8192
    ),
    # What pads most, and float32, whose blocks are largest.
    "attention fp16 32/32x80 page 1, window": partial(attention, paged_attention, FP16, 32, 32, 80, 1, 2048),
    "attention fp32 64/8x64 page 32, softcap": partial(attention, paged_attention, FP32, 64, 8, 64, 32, None, 30.0),
    "attention fp32 32/8x128 page 16": partial(attention, paged_attention, FP32, 32, 8, 128, 16),
    "attention fp32 8/8x256 page 16": partial(attention, paged_attention, FP32, 8, 8, 256, 16),
    # Gemma 4: layers without a window have heads of 512, in planes of as many values; MiMo V2: K of 192, V of 128.
    "attention bf16 8/1x512 page 16": partial(attention, paged_attention, BF16, 8, 1, 512, 16),
    "attention fp32 8/1x512 page 16": partial(attention, paged_attention, FP32, 8, 1, 512, 16),
    "attention bf16 64/4x192 page 16, window, sinks": partial(
        attention, paged_attention, BF16, 64, 4, 192, 16, 128, has_sinks=True
    ),
    # DeepSeek V2 Lite, V2 and V3; MiniCPM 3; and what differs most from both.
    "latents bf16 16x512+64 page 16": partial(latents, BF16, 16, 512, 64, 16),
    "latents bf16 128x512+64 page 64": partial(latents, BF16, 128, 512, 64, 64),
    "latents bf16 40x256+32 page 16": partial(latents, BF16, 40, 256, 32, 16),
    "latents fp32 16x512+64 page 1": partial(latents, FP32, 16, 512, 64, 1),
    "latents fp16 20x192+96 page 16, window, softcap, sinks": partial(
        latents, FP16, 20, 192, 96, 16, 4096, 30.0, has_sinks=True
    ),
    **{
        f"shared attention {name} {heads}/{kv_heads}x{head_dim} page 16": partial(
            shared_attention, dtype, heads, kv_heads, head_dim, 16
        )
        for name, dtype, heads, kv_heads, head_dim in (
            ("bf16", BF16, 32, 8, 128),
            ("bf16", BF16, 8, 4, 256),
            ("fp32", FP32, 32, 32, 128),
        )
    },
    "fp8 attention bf16 32/8x128 page 16": partial(attention, paged_attention, BF16, 32, 8, 128, 16, is_rounded=True),
    "fp8 attention bf16 14/2x64 page 1": partial(attention, paged_attention, BF16, 14, 2, 64, 1, is_rounded=True),
    "fp8 attention fp32 8/8x256 page 16": partial(attention, paged_attention, FP32, 8, 8, 256, 16, is_rounded=True),
    "fp8 shared attention bf16 32/8x128 page 16": partial(shared_attention, BF16, 32, 8, 128, 16, is_rounded=True),
    "fp8 rotate bf16 32/8x128": partial(rotate, BF16, 32, 8, 128, is_rounded=True),
    "fp8 write bf16 8x128": partial(write, BF16, 8, 128, is_rounded=True),
    "exact attention bf16 32/8x128 page 16": partial(attention, exact_attention, BF16, 32, 8, 128, 16),
    "exact attention bf16 8/4x256 page 64, window, softcap": partial(
        attention, exact_attention, BF16, 8, 4, 256, 64, 4096, 50.0
    ),
    "exact attention bf16 64/8x64 page 16, chunk, sinks": partial(
        attention, exact_attention, BF16, 64, 8, 64, 16, None, None, 8192, has_sinks=True
    ),
    "exact attention fp32 64/8x64 page 32": partial(attention, exact_attention, FP32, 64, 8, 64, 32),
    "exact products bf16 4096": partial(exact_products, BF16, 4096, 4096),
    "exact products bf16 4096, wide": partial(exact_products, BF16, 4096, 14_336),
    "exact products fp32 2048": partial(exact_products, FP32, 2048, 2048),
    "exact rows bf16 4096": partial(exact_rows, BF16, 4096),
    "exact rows fp32 5120": partial(exact_rows, FP32, 5120),
    "norm bf16 4096": partial(norm, BF16, 4096),
    "norm fp32 5120": partial(norm, FP32, 5120),
    "norm bf16 16384": partial(norm, BF16, 16_384),
    "gate bf16 14336": partial(gate, BF16, 14_336),
    "rotate bf16 32/8x128": partial(rotate, BF16, 32, 8, 128),
    "rotate fp16 28/4x64": partial(rotate, FP16, 28, 4, 64),
    "rotate fp32 8/8x96": partial(rotate, FP32, 8, 8, 96),
    "rotate bf16 8/1x256": partial(rotate, BF16, 8, 1, 256),
    **{f"check bf16 8x128 page {size}": partial(check, 8, 128, size) for size in (1, 64)},
    "write bf16 8x128": partial(write, BF16, 8, 128),
    "write fp16 32x80": partial(write, FP16, 32, 80),
    "write fp32 1x256": partial(write, FP32, 1, 256),
    **{f"move bf16 8x128 page {size}": partial(move, "bfloat16", 8, 128, size) for size in (1, 64)},
    "move fp16 32x80 page 1": partial(move, "float16", 32, 80, 1),
}
