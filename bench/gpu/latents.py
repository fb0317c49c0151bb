"""Decode attention to latents, absorbed, by our kernel: how near it comes to what memory and tensor cores allow.

One layer of the sizes of DeepSeek V2 Lite (16 heads) and V3 (128 heads), latents of 512 + 64 values in bfloat16, one
row a request. Results are compared with plain torch over the same pages before their time counts. Latents that must be
read once are counted in GB/s beside those of a copy, products of all heads in TFLOP/s beside those of a matrix product:
with 128 heads a key takes so many products that both bounds are near. Expanding queries and values is not counted.

``python -m bench.gpu.latents [--quick | --cpu] [--rounds 9]``
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.gpu import reading, timing
from bench.gpu.attention_peers import Heads, Problem
from services.worker.engine.forward_meta import Segment
from services.worker.engine.torch_attention import page_tables, torch_attention
from services.worker.kernels import latent_attention

LITE, LARGE = Heads("deepseek-v2-lite", 16, 1, 576), Heads("deepseek-v3", 128, 1, 576)
TINY = Heads("tiny-latents", 4, 1, 32)
RANKS = {LITE: 512, LARGE: 512, TINY: 24}
PAGE_SIZE = 16

POINTS = [(1, 4096), (16, 4096), (64, 4096), (1, 32_768), (16, 32_768)]
"""(requests, context)."""

TINY_POINTS = [(3, 40)]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def points(run: reading.Reading) -> list[tuple[Heads, int, int]]:
    """(heads, requests, context) in the order in which they are measured."""
    if run.is_tiny:
        return [(TINY, *point) for point in TINY_POINTS]
    return [(heads, *point) for point in (POINTS[1:2] if run.is_quick else POINTS) for heads in (LITE, LARGE)]


def measure(problem: Problem, rounds: int) -> dict[str, float]:
    """Microseconds, GB/s of latents and TFLOP/s. Raises SystemExit if our result is not torch's."""
    heads, rank, scaling = problem.heads, RANKS[problem.heads], problem.heads.dim**-0.5
    pool, paged = problem.pool[0], problem.paged
    q = problem.query.transpose(1, 2).flatten(0, 1)
    segments = tuple(Segment(1, problem.context, pages) for pages in problem.table.cpu().numpy().astype(np.int32))
    tables = page_tables(segments, problem.page_size, problem.device)
    expected = torch_attention(q, pool, pool, segments, tables, scaling=scaling)[..., :rank].float()
    found = latent_attention(q, pool, paged, rank=rank, scaling=scaling).float()
    deviation = (found - expected).abs().max().item()
    if not deviation <= TOLERANCE[problem.dtype] * (1 + expected.abs().max().item()):
        raise SystemExit(f"our attention to latents is not torch's: {problem}, off by {deviation:.3g}")
    seconds = timing.device_seconds(
        lambda: latent_attention(q, pool, paged, rank=rank, scaling=scaling), 3 * rounds, problem.device
    )
    products = 2.0 * problem.batch * problem.length * heads.query * (heads.dim + rank)
    return {
        "deviation": deviation,
        "us": seconds * 1e6,
        "gb_s": problem.kv_bytes / 2 / seconds / 1e9,  # Latents are keys and values at once.
        "tflop_s": products / seconds / 1e12,
    }


def headline(found: list[dict[str, Any]]) -> reading.Headline:
    """What of either ceiling the kernel reaches."""
    return [
        (
            f"{each['heads']} decode, {each['requests']} x {each['context']}",
            each["gb_s"],
            f"GB/s, {100 * each['of_copy']:.0f}% of a copy; {each['tflop_s']:.3g} TFLOP/s, "
            f"{100 * each['of_gemm']:.0f}% of a matrix product",
        )
        for each in found
    ]


def main() -> None:
    run = reading.begin("latents", __doc__)
    dtype = run.choose(torch.bfloat16, torch.bfloat16, torch.float32)
    ceilings = {
        "copy_gb_s": timing.copy_gb_s(run.device, run.choose(2**31, 2**31, 2**16), run.rounds),
        "gemm_tflop_s": timing.gemm_tflop_s(run.device, run.choose(8192, 8192, 64), dtype, run.rounds),
    }
    found: list[dict[str, Any]] = []
    results: dict[str, Any] = {"ceilings": ceilings, "page_size": PAGE_SIZE, "points": found}
    for heads, requests, context in run.each(points(run)):
        figures = measure(Problem(heads, requests, context - 1, 1, PAGE_SIZE, dtype, run.device), run.rounds)
        found.append(
            {"heads": heads.name, "requests": requests, "context": context}
            | figures
            | {
                "of_copy": figures["gb_s"] / ceilings["copy_gb_s"],
                "of_gemm": figures["tflop_s"] / ceilings["gemm_tflop_s"],
            }
        )
        run.keep(results)
    run.finish(results, headline(found))


if __name__ == "__main__":
    main()
