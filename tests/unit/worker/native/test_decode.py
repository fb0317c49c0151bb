"""The compiled decode kernel, wherever there is a C compiler, against plain softmax attention."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.native_work import find_decode_work
from services.worker.kv.device_pool import TORCH_DTYPES
from services.worker.native.decode import NativeDecode, compile_decode
from shared.messages.pools import KvGeometry
from tests.unit.worker.torch_threads import torch_threads

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def geometry(dtype: str = "float32", page_size: int = 16, head_dim: int = 32) -> KvGeometry:
    return KvGeometry(layers=1, kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype)


def compiled(shape: KvGeometry, heads: int) -> NativeDecode:
    kernel = compile_decode(shape, heads)
    assert kernel is not None
    return kernel


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """query [heads, head_dim], key and value [keys, kv_heads, head_dim]; in double precision."""
    group = query.shape[0] // key.shape[1]
    keys, values = (half.double().repeat_interleave(group, dim=1) for half in (key, value))
    scores = torch.einsum("hd,khd->hk", query.double(), keys) * query.shape[1] ** -0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


@needs_compiler
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("page_size", "head_dim", "heads"), [(1, 32, 2), (16, 32, 6), (64, 20, 4)])
def test_decode_equals_softmax_attention(
    page_size: int, head_dim: int, heads: int, dtype: str, window: int | None
) -> None:
    """Any length, window, group and page size, over shuffled pages, beside segments that it must leave alone."""
    shape = geometry(dtype, page_size, head_dim)
    generator = torch.Generator().manual_seed(1)
    lengths, rows = [1, 255, 256, 257, 700, 9], [1, 1, 1, 1, 1, 4]
    counts = [-(-length // page_size) for length in lengths]
    tables = np.split(np.random.default_rng(0).permutation(sum(counts)).astype(np.int32), np.cumsum(counts)[:-1])
    pool = (torch.randn(2, sum(counts), page_size, 2, head_dim, generator=generator) * 2).to(TORCH_DTYPES[dtype])
    query = torch.randn(sum(rows), heads, head_dim, generator=generator).to(pool.dtype)
    segments = [Segment(r, n - r, table) for r, n, table in zip(rows, lengths, tables, strict=True)]
    work = find_decode_work(ForwardMeta.build(segments, page_size, "cpu"), window)
    output = torch.full_like(query, -7.0)

    assert work is not None
    compiled(shape, heads).attend(work, query.transpose(0, 1), pool[0], pool[1], output, head_dim**-0.5)

    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for row, length, table in zip(range(5), lengths, tables, strict=False):
        first = 0 if window is None else max(0, length - window)
        key, value = (half[torch.from_numpy(table).long()].flatten(0, 1)[first:length] for half in pool)
        torch.testing.assert_close(
            output[row].double(), expected(query[row], key, value), atol=tolerance, rtol=tolerance
        )
    assert (output[5:] == -7.0).all()


@needs_compiler
def test_threads_change_nothing() -> None:
    """Two threads give the bits of one."""
    shape = geometry()
    kernel = compiled(shape, 6)
    pool = torch.randn(2, 80, 16, 2, 32, generator=torch.Generator().manual_seed(2))
    query = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(3)).transpose(0, 1)
    segments = [Segment(1, length - 1, np.arange(80, dtype=np.int32)) for length in (1280, 600, 3)]
    work = find_decode_work(ForwardMeta.build(segments, 16, "cpu"), None)
    assert work is not None
    outputs = torch.empty(2, 3, 6, 32)
    for threads, output in enumerate(outputs, start=1):
        with torch_threads(threads):
            kernel.attend(work, query, pool[0], pool[1], output, 0.2)

    assert torch.equal(outputs[0], outputs[1])


@needs_compiler
def test_nan_in_the_cache_comes_out_as_nan() -> None:
    """Broken KV is never smoothed over: the sampler is to see it and fail the request."""
    pool = torch.randn(2, 2, 16, 2, 32, generator=torch.Generator().manual_seed(4))
    pool[0, 1, 3] = float("nan")
    work = find_decode_work(ForwardMeta.build([Segment(1, 29, np.arange(2, dtype=np.int32))], 16, "cpu"), None)
    output = torch.zeros(1, 2, 32)

    assert work is not None
    compiled(geometry(), 2).attend(work, torch.randn(2, 1, 32), pool[0], pool[1], output, 0.2)

    assert output.isnan().all()


def test_half_precision_is_left_to_the_portable_path() -> None:
    """The C code has float and bfloat16."""
    assert compile_decode(geometry("float16"), 4) is None
