"""Rounded K and V in the compiled kernels: written as torch writes them, and attended to as what they stand for."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.paged_step import PagedStep
from services.worker.kv.device_pool import DTYPE_NAMES, DevicePool
from services.worker.kv.float8 import rounded, to_float8
from services.worker.native import build
from shared.messages.pools import FLOAT8, KvGeometry
from tests.run_name import shm_prefix
from tests.unit.worker.kv.test_float8 import heads

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

_SHIM = """#include "kept.h"
void keep(const element *heads, int64_t count, int64_t head_dim, kept *to) {
    for (int64_t h = 0; h < count; h++) keep_head(heads + h * head_dim, head_dim, to + h * KEPT_WIDTH(head_dim));
}
void decode_all(float *to) {
    for (int code = 0; code < 256; code++) to[code] = decoded((kept)code);
}
"""


def compiled(tmp_path: Path, dtype: torch.dtype) -> ctypes.CDLL:
    """``kept.h`` by itself, for heads of ``dtype``."""
    target, folder = tmp_path / "kept.so", Path(build.__file__).parent
    flags = ["-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-DROUNDED=1"]
    flags += [f"-DBFLOAT16={int(dtype == torch.bfloat16)}", "-I", str(folder), "-x", "c", "-", "-o", str(target)]
    subprocess.run(["cc", *flags], input=_SHIM.encode(), check=True)
    return ctypes.CDLL(str(target))


@needs_compiler
@pytest.mark.parametrize("head_dim", [1, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_kept_as_torch_keeps_them(tmp_path: Path, dtype: torch.dtype, head_dim: int) -> None:
    """To the bit, at every size that float32 has, ties and numbers that are none among them."""
    generator = torch.Generator().manual_seed(5)
    ties = torch.randint(-256, 256, (512, head_dim), generator=generator) / 16
    values = torch.cat([heads(head_dim) if head_dim > 8 else heads(20)[:, :head_dim], ties]).to(dtype).contiguous()
    values[8, 0], values[9, 0] = float("nan"), float("-inf")
    expected = to_float8(values)

    found = torch.full_like(expected, 77)
    keep = compiled(tmp_path, dtype).keep
    keep.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    keep(values.data_ptr(), len(values), head_dim, found.data_ptr())

    # A NaN is one whatever its other bits are.
    odd = torch.arange(len(values)) // 2 == 4
    assert torch.equal(found[~odd], expected[~odd])
    assert torch.equal(found[odd, :head_dim], expected[odd, :head_dim])
    assert found[odd, -4:].contiguous().view(torch.float32).isnan().all()


@needs_compiler
def test_every_code_stands_for_what_torch_says(tmp_path: Path) -> None:
    """All 254 that are numbers."""
    found = torch.empty(256)
    decode_all = compiled(tmp_path, torch.float32).decode_all
    decode_all.argtypes = [ctypes.c_void_p]

    decode_all(found.data_ptr())

    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    assert torch.equal(found[is_number], expected[is_number])
    assert torch.equal(found[is_number].signbit(), expected[is_number].signbit())


class Step:
    """A step of prefill chunks and decode rows over shuffled pages, in a rounded pool and one that is not."""

    def __init__(self, dtype: torch.dtype, page_size: int, head_dim: int) -> None:
        self.dtype, self.head_dim = dtype, head_dim
        lengths, rows = [300, 260, 1, 90], [1, 70, 1, 90]
        counts = [-(-length // page_size) for length in lengths]
        tables = np.split(np.random.default_rng(0).permutation(sum(counts)).astype(np.int32), np.cumsum(counts)[:-1])
        segments = [Segment(r, n - r, table) for r, n, table in zip(rows, lengths, tables, strict=True)]
        self.meta = ForwardMeta.build(segments, page_size, "cpu")
        generator = torch.Generator().manual_seed(1)
        self.pages, self.page_size = sum(counts), page_size
        shape = (2, self.pages * page_size, 2, head_dim)
        self.context = (torch.randn(shape, generator=generator) * 2).to(dtype)
        new = torch.randn(3, sum(rows), 6, head_dim, generator=generator).to(dtype) * 2
        self.query, self.key, self.value = new[0], new[1, :, :2], new[2, :, :2]

    def attend(self, *, is_rounded: bool, portable: bool = False, softcap: float | None = None) -> torch.Tensor:
        """Attention over what the pools stand for: rounded by the pool, or beforehand."""
        name = FLOAT8 if is_rounded else DTYPE_NAMES[self.dtype]
        geometry = KvGeometry(layers=1, kv_heads=2, head_dim=self.head_dim, page_size=self.page_size, dtype=name)
        pool = DevicePool.create(geometry, self.pages, device="cpu", shm_prefix=shm_prefix("kept"))
        try:
            keep = to_float8 if is_rounded else rounded
            for half, kept in zip((pool.k(0), pool.v(0)), self.context, strict=True):
                half.flatten(0, 1).copy_(keep(kept))
            backend = CpuAttention(pool, dtype=self.dtype, packs_single_rows=True)
            if portable:
                backend._kernels = lambda shape: (None, None)  # type: ignore[method-assign]
            key, value = (half if is_rounded else rounded(half) for half in (self.key, self.value))
            query, key, value = (each.transpose(0, 1)[None] for each in (self.query, key, value))
            call = AttentionCall(0, query, key, value, 0.2, None, softcap, {})
            return PagedStep(self.meta, pool, backend).attend(call).clone()
        finally:
            pool.close()


@pytest.mark.parametrize(
    ("dtype", "portable", "softcap"),
    [
        (torch.float32, False, None),
        (torch.bfloat16, False, None),
        (torch.float32, True, None),
        (torch.bfloat16, True, None),
        (torch.float16, False, None),
        (torch.float32, False, 20.0),
    ],
)
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 32), (16, 20), (64, 64)])
def test_attention_is_over_what_rounded_pages_stand_for(
    page_size: int, head_dim: int, dtype: torch.dtype, portable: bool, softcap: float | None
) -> None:
    """Decode rows, chunks behind context and whole prompts: as over pages of values that were rounded before, by the
    compiled kernel to the bit.
    """
    step = Step(dtype, page_size, head_dim)

    found = step.attend(is_rounded=True, portable=portable, softcap=softcap)

    is_compiled = not portable and softcap is None and dtype != torch.float16
    tolerance = 0.0 if is_compiled else 1e-4 if dtype == torch.float32 else 1e-2
    expected = step.attend(is_rounded=False, portable=portable, softcap=softcap)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert not torch.equal(found, torch.zeros_like(found))
