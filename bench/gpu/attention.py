"""Our paged attention kernels against PyTorch's SDPA and FlexAttention, and against what the device can do.

One layer of Llama-3.1-8B's and of Qwen2.5-14B's heads in bfloat16, decode (one row a request) and extend (chunks of a
prompt). Results are compared before their time counts. Decode is judged by the K and V that it reads, in GB/s beside
those of a copy; extend by the products that it computes, in TFLOP/s beside those of a matrix product. SDPA has its KV
in one piece; what it costs to bring it there from a paged pool is measured too. FlexAttention is compiled, which takes
so long that it is done for few points. A worker's backends, ours and FlashInfer, decode in CUDA graphs.

``python -m bench.gpu.attention [--quick | --cpu] [--rounds 9]``
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.gpu import reading, timing
from bench.gpu.attention_backends import measure_backends
from bench.gpu.attention_peers import Attend, Heads, Problem, flex, gathering_sdpa, ours, sdpa
from bench.gpu.decode import PlayedCapture
from services.worker.engine.cuda_capture import Capture, CudaCapture
from services.worker.engine.gpu_attention import KERNELS

LLAMA, QWEN = Heads("llama-3.1-8b", 32, 8, 128), Heads("qwen2.5-14b", 40, 8, 128)
TINY_LLAMA, TINY_QWEN = Heads("tiny-llama", 4, 2, 16), Heads("tiny-qwen", 5, 1, 16)
PAGE_SIZE = 16

DECODE = [(1, 32_768), (16, 4096), (64, 4096), (1, 1024), (64, 1024), (16, 32_768), (4, 16_384), (64, 32_768)]
"""(requests, context), the most telling first."""

EXTEND = [(1, 0, 2048), (1, 16_384, 2048), (4, 4096, 512), (1, 32_256, 512), (16, 1024, 128)]
"""(requests, context, rows): a whole batch of a prompt, chunks of long ones, several requests' together."""

FLEX = {(16, 4096, 1), (1, 32_768, 1), (1, 16_384, 2048)}
"""Points of Llama's that FlexAttention is compiled for."""

BACKENDS = [(1, 4096), (8, 4096), (64, 4096)]
"""(requests, context) of decode by each backend of a worker, in CUDA graphs."""

TINY_BACKENDS = [(3, 40)]

TINY_POINTS = [(3, 40, 1), (1, 0, 24), (2, 16, 9)]

BLOCK = 128
"""Tokens of FlexAttention's pages."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def points(run: reading.Reading) -> list[tuple[Heads, int, int, int]]:
    """(heads, requests, context, rows) in the order in which they are measured: both models' take turns."""
    if run.is_tiny:
        return [(heads, *point) for point in TINY_POINTS for heads in (TINY_LLAMA, TINY_QWEN)]
    decode, extend = [(*each, 1) for each in DECODE], list(EXTEND)
    if run.is_quick:
        decode, extend = decode[1:2], extend[:1]
    turns = [each for pair in zip(decode, extend, strict=False) for each in pair] + decode[len(extend) :]
    return [(heads, *point) for heads in (LLAMA, QWEN) for point in turns]


def measure(problem: Problem, run: reading.Reading, with_flex: bool) -> dict[str, Any]:
    """Microseconds by every means. Raises SystemExit if our result is not SDPA's."""
    kv = problem.gathered()
    means: dict[str, Attend] = {
        "ours": ours(problem),
        "sdpa": sdpa(problem, kv),
        "gather_sdpa": gathering_sdpa(problem),
    }
    expected = means["sdpa"]().float()
    found: dict[str, Any] = {"deviation": (means["ours"]().float() - expected).abs().max().item()}
    if not found["deviation"] <= TOLERANCE[problem.dtype] * (1 + expected.abs().max().item()):
        raise SystemExit(f"our attention is not SDPA's: {problem}, off by {found['deviation']:.3g}")
    if with_flex:
        try:
            began = time.perf_counter()
            means["flex"] = flex(problem, run.choose(BLOCK, BLOCK, PAGE_SIZE), is_compiled=not run.is_tiny)
            found["flex_deviation"] = (means["flex"]().float() - expected).abs().max().item()
            found["flex_compile_s"] = time.perf_counter() - began
        except Exception as error:  # Experimental in PyTorch: what it cannot do is a finding, and ours is measured on.
            means.pop("flex", None)
            found["flex_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    spent = {name: timing.device_seconds(attend, 3 * run.rounds, run.device) for name, attend in means.items()}
    return found | {f"{name}_us": seconds * 1e6 for name, seconds in spent.items()}


def judged(problem: Problem, figures: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    """The figures with what they are of the device's."""
    seconds = {name.removesuffix("_us"): each / 1e6 for name, each in figures.items() if name.endswith("_us")}
    if problem.rows == 1:
        rates = {name: problem.kv_bytes / each / 1e9 for name, each in seconds.items()}
        unit, ceiling = "gb_s", ceilings["copy_gb_s"]
    else:
        rates = {name: problem.flop / each / 1e12 for name, each in seconds.items()}
        unit, ceiling = "tflop_s", ceilings["gemm_tflop_s"]
    return figures | {
        unit: rates,
        "of_ceiling": rates["ours"] / ceiling,
        "over_sdpa": seconds["sdpa"] / seconds["ours"],
        "over_gather_sdpa": seconds["gather_sdpa"] / seconds["ours"],
    }


def headline(found: list[dict[str, Any]]) -> reading.Headline:
    """What ours reaches, and beside SDPA."""
    lines: list[tuple[str, float | None, str]] = []
    for each in found:
        kind = "decode" if each["rows"] == 1 else f"extend {each['rows']}"
        unit = "gb_s" if each["rows"] == 1 else "tflop_s"
        beside = f"{each['over_sdpa']:.2f}x SDPA, {each['over_gather_sdpa']:.2f}x with gathering"
        share = f"{100 * each['of_ceiling']:.0f}% of the ceiling, {beside}"
        name = f"{each['heads']} {kind}, {each['requests']} x {each['context']}"
        lines.append((name, each[unit]["ours"], f"{'GB/s' if unit == 'gb_s' else 'TFLOP/s'}, {share}"))
    return lines


def backends_headline(found: list[dict[str, Any]]) -> reading.Headline:
    """FlashInfer beside ours, or why it is not."""
    lines: list[tuple[str, float | None, str]] = []
    for each in found:
        name = f"FlashInfer over ours in a graph, decode, {each['requests']} x {each['context']}"
        ours, other = each["triton"], each["flashinfer"]
        if "graph_us" in other:
            told = f"times as fast, {other['gb_s']:.3g} GB/s, planned in {other['plan_us']:.3g} us"
            lines.append((name, ours["graph_us"] / other["graph_us"], told))
        else:
            lines.append((name, None, other.get("absent") or other["error"]))
    return lines


def main() -> None:
    run = reading.begin("attention", __doc__)
    dtype = run.choose(torch.bfloat16, torch.bfloat16, torch.float32)
    ceilings = {
        "copy_gb_s": timing.copy_gb_s(run.device, run.choose(2**31, 2**31, 2**16), run.rounds),
        "gemm_tflop_s": timing.gemm_tflop_s(run.device, run.choose(8192, 8192, 64), dtype, run.rounds),
    }
    found: list[dict[str, Any]] = []
    backends: list[dict[str, Any]] = []
    results: dict[str, Any] = {
        "ceilings": ceilings, "page_size": PAGE_SIZE, "flex_block": BLOCK, "points": found, "backends": backends,
    }  # fmt: skip
    capture: Capture = CudaCapture(run.device) if run.device.type == "cuda" else PlayedCapture()
    for requests, context in run.each(run.choose(BACKENDS, BACKENDS[1:2], TINY_BACKENDS)):
        heads = run.choose(LLAMA, LLAMA, TINY_LLAMA)
        problem = Problem(heads, requests, context - 1, 1, PAGE_SIZE, dtype, run.device)
        figures = measure_backends(problem, capture, run.rounds, kernels=KERNELS)
        backends.append({"requests": requests, "context": context} | figures)
        run.keep(results)
    for heads, requests, context, rows in run.each(points(run)):
        # A decode step's own token is the last of its context.
        before = context - 1 if rows == 1 else context
        problem = Problem(heads, requests, before, rows, PAGE_SIZE, dtype, run.device)
        with_flex = heads is TINY_LLAMA or (heads is LLAMA and (requests, context, rows) in FLEX)
        figures = judged(problem, measure(problem, run, with_flex), ceilings)
        found.append({"heads": heads.name, "requests": requests, "context": context, "rows": rows} | figures)
        del problem
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.keep(results)
    run.finish(results, [*headline(found), *backends_headline(backends)])


if __name__ == "__main__":
    main()
