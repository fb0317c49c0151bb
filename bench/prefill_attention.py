"""Attention of a prefill chunk over the paged pool of a CPU: the compiled kernel, the portable path, and torch alone.

One layer of 12 query and 4 KV heads of 64 dimensions (``bench.make_model``), pages in random order. ``torch`` is one
call of ``scaled_dot_product_attention`` over keys that lie in one piece, expanded to the query heads beforehand: less
than either path has to do. ``product_gflops`` is what a large product of matrices of the same dtype reaches here.

``python -m bench.prefill_attention [--rounds 9] [--threads 2]``
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import results_file
from services.worker.engine import cpu_attention
from services.worker.engine.attention import AttentionCall
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.kv.device_pool import DTYPE_NAMES, DevicePool
from shared.messages.pools import KvGeometry

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 12, 4, 64, 16
CASES = ((512, 0), (2048, 0), (2048, 6144), (32, 512), (32, 2048), (32, 8192))
PRODUCT = 2048


class Chunk:
    """``rows`` new tokens after ``context`` others, all of whose K and V are in a pool of their own."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        pages = -(-(rows + context) // PAGE_SIZE)
        self.rows, self.context = rows, context
        self.pool = DevicePool.create(
            KvGeometry(layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype=DTYPE_NAMES[dtype]),
            pages,
            device="cpu",
            shm_prefix="bench",
        )
        self.pool.tensor.copy_(torch.randn(self.pool.tensor.shape, generator=generator))
        table = np.random.default_rng(seed).permutation(pages).astype(np.int32)
        self.meta = ForwardMeta.build([Segment(rows, context, table)], PAGE_SIZE, "cpu")
        slots = self.pool.tensor[0, :, torch.from_numpy(table).long()].flatten(1, 2)[:, : rows + context]
        self.key, self.value = slots.transpose(1, 2)[:, None].repeat_interleave(HEADS // KV_HEADS, dim=2).contiguous()
        self.query = torch.randn(1, HEADS, rows, HEAD_DIM, generator=generator).to(dtype)
        new = self.key[:, :: HEADS // KV_HEADS, context:], self.value[:, :: HEADS // KV_HEADS, context:]
        self.call = AttentionCall(0, self.query, *new, HEAD_DIM**-0.5, None, None, {})
        self.seen = None if context == 0 else torch.ones(rows, rows + context, dtype=torch.bool).tril(context)

    @property
    def flops(self) -> float:
        """Two products of every query row with every key that it sees."""
        return 4.0 * HEADS * HEAD_DIM * self.rows * (self.context + (self.rows + 1) / 2)

    def paged(self, backend: CpuAttention) -> torch.Tensor:
        return backend.for_step(self.meta)(self.call)

    def contiguous(self) -> torch.Tensor:
        return scaled_dot_product_attention(
            self.query, self.key, self.value, attn_mask=self.seen, is_causal=self.seen is None
        )


def compare(chunk: Chunk, rounds: int) -> dict[str, Any]:
    """Median milliseconds and GFLOP/s of the three, measured in turns."""
    native, portable = CpuAttention(chunk.pool), CpuAttention(chunk.pool)
    with mock.patch.object(cpu_attention, "compile_decode", return_value=None):
        expected = chunk.paged(portable)
    found = chunk.paged(native)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "native": lambda: chunk.paged(native),
        "portable": lambda: chunk.paged(portable),
        "torch": chunk.contiguous,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # The first warms up.
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    figures: dict[str, Any] = {"rows": chunk.rows, "context": chunk.context}
    for name, values in times.items():
        middle = statistics.median(values[1:])
        figures[name] = {"ms": middle * 1e3, "gflops": chunk.flops / middle / 1e9}
    pairs = zip(times["portable"][1:], times["native"][1:], strict=True)
    figures["native_faster_by"] = statistics.median(before / after for before, after in pairs)
    return figures


def product_gflops(dtype: torch.dtype, rounds: int) -> float:
    """What a product of two square matrices of ``PRODUCT`` rows reaches."""
    one, other = torch.randn(2, PRODUCT, PRODUCT).to(dtype)
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - started)
    return 2 * PRODUCT**3 / statistics.median(times[1:]) / 1e9


@torch.inference_mode()
def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"threads": options.threads, "rounds": options.rounds, "by_dtype": {}}
    for dtype in (torch.float32, torch.bfloat16):
        cases = []
        for rows, context in CASES:
            chunk = Chunk(rows, context, dtype, options.seed)
            try:
                cases.append(compare(chunk, options.rounds))
            finally:
                chunk.pool.close()
            print(DTYPE_NAMES[dtype], cases[-1], flush=True)
        product = product_gflops(dtype, options.rounds)
        results["by_dtype"][DTYPE_NAMES[dtype]] = {"product_gflops": product, "cases": cases}
        print(DTYPE_NAMES[dtype], f"product of matrices: {product:.0f} GFLOP/s", flush=True)
    print(results_file.write("prefill_attention", results, seed=options.seed))


if __name__ == "__main__":
    main()
