"""A decode step as a CUDA graph against the same step launched kernel by kernel, and against what memory allows.

Random weights of Llama-3.1-8B in bfloat16. Both ways compute whole steps as a worker does, from token ids to logits on
the processor's side of the bus; their logits are compared before their time counts. A step cannot be faster than the
weights and the KV that it reads take at the measured speed of a copy; ``of_floor`` says how near it comes.

``python -m bench.gpu.decode [--quick | --cpu] [--rounds 9]``
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu import reading, timing
from bench.gpu.models import LLAMA_8B, SHALLOW_LAYERS, TINY, random_runner, weight_bytes
from services.worker.engine.cuda_capture import Capture, CudaCapture, Graph
from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.forward_meta import ForwardMeta, Segment, paged_tensors
from services.worker.engine.model_runner import ModelRunner

PAGE_SIZE = 16
POINTS = [(1, 1024), (16, 1024), (64, 1024), (1, 16_384), (16, 16_384), (64, 4096), (4, 1024), (32, 1024), (8, 4096)]
"""(requests, tokens of context of each), the most telling first."""

TINY_POINTS = [(2, 40)]

SHARED_POINTS = [(16, 16_384), (64, 4096)]
"""(requests, tokens of a document that is all that they have in common but one page)."""

TINY_SHARED_POINTS = [(5, 1040)]


class PlayedCapture:
    """For a processor, which has no graphs: calls the step again. All but the capture is what a GPU does."""

    def graph_of(self, run: Callable[[], None]) -> Graph:
        run()
        return _PlayedGraph(run)

    def used_bytes(self) -> int:
        return 0


class _PlayedGraph:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class Step:
    """One token of each of ``requests`` requests that have ``context`` tokens in pages anywhere in the pool."""

    def __init__(
        self, runner: ModelRunner, graphs: DecodeGraphs, requests: int, context: int, *, is_shared: bool = False
    ) -> None:
        """``is_shared``: all but the last page is the same for all requests."""
        self._runner, self._graphs, self.attends_once = runner, graphs, True
        page_size = runner.geometry.page_size
        pages = context // page_size + 1
        order = np.random.default_rng(0).permutation(runner.pool.pages).astype(np.int32)
        # Contexts that together are larger than the pool share pages, but not the last, which is written.
        own, shared = order[:requests], np.resize(order[requests:], requests * (pages - 1)).reshape(requests, -1)
        if is_shared:
            shared = np.tile(shared[0], (requests, 1))
        self._segments = [Segment(1, context, np.append(shared[row], own[row])) for row in range(requests)]
        self._ids = torch.arange(requests) * 7919 % runner.vocab_size
        self._positions = torch.full((requests,), context)
        self._last_rows = torch.arange(requests)

    def eager(self) -> torch.Tensor:
        meta = self._meta()
        return self._runner.run(self._ids, self._positions, self._runner.paged_step(meta), self._last_rows)

    @torch.inference_mode()
    def graphed(self) -> torch.Tensor:
        logits = self._graphs.replay(self._ids, self._positions, self._meta(), self._last_rows)
        if logits is None:
            raise SystemExit(f"no graph serves a step of {len(self._segments)} rows")
        return logits

    def _meta(self) -> ForwardMeta:
        """With ``attends_once`` off, every request attends to what they share by itself."""
        size, device = self._runner.geometry.page_size, self._runner.pool.device
        meta = ForwardMeta.build(self._segments, size, device)
        if self.attends_once:
            return meta
        return replace(meta, paged=replace(meta.paged or paged_tensors(self._segments, size, device), shared=None))


def fill_pool(runner: ModelRunner) -> None:
    """Random KV, layer by layer: of zeros attention would be nothing but a sum."""
    for layer in range(runner.geometry.layers):
        runner.pool.tensor[layer].normal_(std=0.5)


def measure(step: Step, run: reading.Reading, floor_s: float) -> dict[str, Any]:
    """Milliseconds of a step by both means. Raises SystemExit if they compute something else."""
    expected, found = step.eager(), step.graphed()
    spread = expected.std(dim=-1, keepdim=True).clamp_min(1e-12)
    deviation = ((found - expected) / spread).square().mean(dim=-1).sqrt().mean().item()
    if not deviation <= 0.1:
        raise SystemExit(f"a captured step gives other logits: relative deviation {deviation:.3g}")
    ways = {"eager": step.eager, "graph": step.graphed}
    # The next token is chosen from logits on the device and fetched, as the sampler does.
    spent = {
        name: timing.wall_seconds(partial(_next_tokens, way), 3 * run.rounds, run.device) for name, way in ways.items()
    }
    return {
        "eager_ms": spent["eager"] * 1e3,
        "graph_ms": spent["graph"] * 1e3,
        "speedup": spent["eager"] / spent["graph"],
        "floor_ms": floor_s * 1e3,
        "of_floor": floor_s / spent["graph"],
        "same_tokens": bool(torch.equal(expected.argmax(-1), found.argmax(-1))),
        "deviation": deviation,
    }


def measure_shared(step: Step, run: reading.Reading) -> dict[str, Any]:
    """Milliseconds of a captured step whose requests share a document, attended to once and by each by itself. Raises
    SystemExit if they compute different things.
    """
    spent, logits = {}, {}
    for attends_once in (True, False):
        step.attends_once = attends_once
        logits[attends_once] = step.graphed()
        spent[attends_once] = timing.wall_seconds(partial(_next_tokens, step.graphed), 3 * run.rounds, run.device)
    spread = logits[False].std(dim=-1, keepdim=True).clamp_min(1e-12)
    deviation = ((logits[True] - logits[False]) / spread).square().mean(dim=-1).sqrt().mean().item()
    if not deviation <= 0.1:
        raise SystemExit(f"a document that is attended to once gives other logits: relative deviation {deviation:.3g}")
    return {
        "once_ms": spent[True] * 1e3,
        "each_ms": spent[False] * 1e3,
        "speedup": spent[False] / spent[True],
        "deviation": deviation,
    }


def _next_tokens(way: Callable[[], torch.Tensor]) -> list[int]:
    tokens: list[int] = way().argmax(dim=-1).tolist()
    return tokens


def headline(results: dict[str, Any]) -> reading.Headline:
    """Speed-up of each point."""
    graphs = [
        (
            f"{each['requests']} x {each['context']} tokens: graph over eager",
            each["speedup"],
            f"times, {each['graph_ms']:.3g} ms a step, {100 * each['of_floor']:.0f}% of what memory allows",
        )
        for each in results["points"]
    ]
    shared = [
        (
            f"{each['requests']} x one document of {each['context']} tokens: attended to once over by each",
            each["speedup"],
            f"times, {each['once_ms']:.3g} ms a step",
        )
        for each in results["shared"]
    ]
    return graphs + shared


def main() -> None:
    run = reading.begin("decode", __doc__)
    points = run.choose(POINTS, [(1, 1024), (16, 1024)], TINY_POINTS)
    shape = run.choose(LLAMA_8B, LLAMA_8B | {"num_hidden_layers": SHALLOW_LAYERS}, TINY)
    shared_points = run.choose(SHARED_POINTS, SHARED_POINTS[:1], TINY_SHARED_POINTS)
    sizes = points + shared_points
    pool_tokens = max(requests * (context + PAGE_SIZE) for requests, context in sizes)
    longest = max(context for _, context in sizes) + PAGE_SIZE
    runner = random_runner(
        shape, most_tokens=longest, pool_tokens=pool_tokens, page_size=PAGE_SIZE, device=run.device
    )  # fmt: skip
    try:
        fill_pool(runner)
        kernels: Any = importlib.import_module("services.worker.kernels")
        capture: Capture = CudaCapture(run.device) if run.device.type == "cuda" else PlayedCapture()
        most_rows = max(requests for requests, _ in sizes)
        began = time.perf_counter()
        graphs = DecodeGraphs(runner, most_rows, capture=capture, kernels=kernels)
        results: dict[str, Any] = {
            "layers": shape["num_hidden_layers"],
            "graphs": len(graphs.shapes),
            "capture_s": time.perf_counter() - began,
            "copy_gb_s": timing.copy_gb_s(run.device, run.choose(2**30, 2**30, 2**16), run.rounds),
            "points": [],
            "shared": [],
        }
        weights, token = weight_bytes(runner), runner.geometry.token_bytes
        for requests, context in run.each(points):
            nbytes = weights + requests * context * token
            step = Step(runner, graphs, requests, context)
            found = measure(step, run, nbytes / (results["copy_gb_s"] * 1e9))
            results["points"].append({"requests": requests, "context": context, **found})
            run.keep(results)
        for requests, context in run.each(shared_points):
            step = Step(runner, graphs, requests, context, is_shared=True)
            results["shared"].append({"requests": requests, "context": context, **measure_shared(step, run)})
            run.keep(results)
        run.finish(results, headline(results))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
