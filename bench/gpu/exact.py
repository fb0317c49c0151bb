"""What exact mode costs: products, prefills and decode steps by its kernels, beside the default ones.

Random weights of Llama-3.1-8B in bfloat16. First the model is tried as a worker tries it (``engine.exactness``): a
prompt must have the same bits whole, in chunks, beside others and token by token. Then both modes compute the same
steps, decode steps as CUDA graphs. ``price`` is exact over default.

``python -m bench.gpu.exact [--quick | --cpu] [--rounds 9]``
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu import reading, timing
from bench.gpu.decode import PlayedCapture, fill_pool
from bench.gpu.models import LLAMA_8B, SHALLOW_LAYERS, TINY, random_runner
from services.worker.engine.cuda_capture import Capture, CudaCapture
from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.exactness import Trial, replaced_operators
from services.worker.engine.forward_meta import ForwardMeta, Segment, paged_tensors
from services.worker.engine.gpu_attention import EXACT_KERNELS, KERNELS, GpuAttention
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.paged_step import PagedStep

PAGE_SIZE = 16
STEPS = [(1, 1, 1024), (1, 2048, 0), (64, 1, 1024), (1, 1, 16_384), (1, 2048, 14_336), (16, 1, 16_384), (8, 256, 1024)]
"""(requests, new tokens of each, tokens of context of each), the most telling first."""

TINY_STEPS = [(2, 1, 20), (1, 9, 16)]
ROWS = (1, 64, 2048)
TINY_ROWS = (1, 5)


class Way:
    """One mode over a model and a pool that both share."""

    def __init__(self, runner: ModelRunner, kernels: str) -> None:
        self._runner, self._kernels = runner, kernels
        self._graphs: DecodeGraphs | None = None
        self.exact = kernels == EXACT_KERNELS

    def on(self) -> Any:
        """What keeps this mode's operators in force."""
        return replaced_operators(self._runner.pool.device.type.upper()) if self.exact else None

    def capture(self, rows: int) -> None:
        """Capture decode steps of up to ``rows`` requests."""
        device = self._runner.pool.device
        capture: Capture = CudaCapture(device) if device.type == "cuda" else PlayedCapture()
        kernels: Any = importlib.import_module(self._kernels)
        # The runner that the graphs keep must not keep the operators replaced.
        made = _Stepping(self._runner, self._kernels, object() if self.exact else None)
        operators = self.on()
        self._graphs = DecodeGraphs(made, rows, capture=capture, kernels=kernels)
        del operators

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """As ``ModelRunner.forward``."""
        if self._graphs is not None:
            logits = self._graphs.replay(ids, positions, meta, last_rows)
            if logits is not None:
                return logits
        step = _Stepping(self._runner, self._kernels, None).paged_step(meta)
        return self._runner.run(ids, positions, step, last_rows)


class _Stepping(ModelRunner):
    """A runner whose steps attend by kernels of a package, on a processor too."""

    def __init__(self, runner: ModelRunner, kernels: str, operators: Any) -> None:
        super().__init__(runner.model, runner.pool, vocab_size=runner.vocab_size, operators=operators)
        self._package = kernels

    def paged_step(self, meta: ForwardMeta) -> PagedStep:
        tensors = meta.paged or paged_tensors(meta.segments, meta.page_size, self.pool.device)
        return PagedStep(replace(meta, paged=tensors), self.pool, GpuAttention(self.pool, self._package))


def try_exact(runner: ModelRunner, way: Way) -> int:
    """Tokens of the prompt that had the same bits in every way; 0 on a processor, whose interpreter multiplies by a
    BLAS, which rounds by a row's place.
    """
    if runner.pool.device.type != "cuda":
        return 0
    operators = way.on()
    trial = Trial(way.forward, runner.pool, runner.vocab_size, runner.max_context)
    trial.run()
    del operators
    return trial.tokens


def step_of(runner: ModelRunner, way: Way, requests: int, rows: int, context: int) -> Callable[[], torch.Tensor]:
    """A step of ``requests`` requests that have ``context`` tokens and get ``rows`` more each."""
    size, pages = runner.geometry.page_size, -(-(context + rows) // runner.geometry.page_size)
    order = np.random.default_rng(0).permutation(runner.pool.pages).astype(np.int32)
    # Contexts that together are larger than the pool share pages.
    tables = np.resize(order, requests * pages).reshape(requests, pages)
    segments = [Segment(rows, context, table) for table in tables]
    ids = torch.arange(requests * rows) * 7919 % runner.vocab_size
    positions = torch.arange(context, context + rows).repeat(requests)
    last_rows = torch.arange(1, requests + 1) * rows - 1

    def step() -> torch.Tensor:
        meta = ForwardMeta.build(segments, size, runner.pool.device)
        return way.forward(ids, positions, meta, last_rows)

    return step


def measure_step(runner: ModelRunner, ways: dict[str, Way], shape: tuple[int, int, int], run: Any) -> dict[str, Any]:
    """Milliseconds of a step in both modes. Raises SystemExit where they compute different things."""
    spent, logits = {}, {}
    for name, way in ways.items():
        operators = way.on()
        step = step_of(runner, way, *shape)
        logits[name] = step()
        spent[name] = timing.wall_seconds(step, run.rounds, run.device)
        del operators
    expected, found = logits["default"], logits["exact"]
    deviation = ((found - expected) / expected.std(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt().mean().item()
    if not deviation <= 0.1:
        raise SystemExit(f"exact mode gives other logits: relative deviation {deviation:.3g}")
    return {
        "default_ms": spent["default"] * 1e3,
        "exact_ms": spent["exact"] * 1e3,
        "price": spent["exact"] / spent["default"],
        "deviation": deviation,
    }


def measure_products(runner: ModelRunner, rows: int, run: Any) -> list[dict[str, Any]]:
    """Both products with each shape of weight in the model, for ``rows`` rows."""
    matmul: Any = importlib.import_module("services.worker.kernels.exact.matmul").matmul
    found = []
    weights = {tuple(each.weight.shape): each.weight for each in runner.model.modules() if hasattr(each, "in_features")}
    for (columns, depth), weight in weights.items():
        x = torch.randn(rows, depth, device=run.device).to(weight.dtype)
        ways = {"default": partial(torch.nn.functional.linear, x, weight), "exact": partial(matmul, x, weight)}
        torch.testing.assert_close(ways["exact"](), ways["default"](), atol=0.05 * depth**0.5, rtol=0.05)
        spent = {name: timing.device_seconds(way, run.rounds, run.device) for name, way in ways.items()}
        found.append(
            {
                "rows": rows,
                "columns": columns,
                "depth": depth,
                "default_us": spent["default"] * 1e6,
                "exact_us": spent["exact"] * 1e6,
                "price": spent["exact"] / spent["default"],
                "exact_tflop_s": 2 * rows * columns * depth / spent["exact"] / 1e12,
                "exact_gb_s": weight.nbytes / spent["exact"] / 1e9,
            }
        )
    return found


def headline(results: dict[str, Any]) -> reading.Headline:
    """The price of each step."""
    return [
        (
            f"{each['requests']} x {each['rows']} tokens behind {each['context']}: exact over default",
            each["price"],
            f"times, {each['exact_ms']:.3g} ms in place of {each['default_ms']:.3g}",
        )
        for each in results["steps"]
    ]


def main() -> None:
    run = reading.begin("exact", __doc__)
    steps = run.choose(STEPS, STEPS[:3], TINY_STEPS)
    shape = run.choose(LLAMA_8B, LLAMA_8B | {"num_hidden_layers": SHALLOW_LAYERS}, TINY)
    longest = max(rows + context for _, rows, context in steps) + PAGE_SIZE
    pool_tokens = max(requests * (rows + context + PAGE_SIZE) for requests, rows, context in steps)
    runner = random_runner(
        shape, most_tokens=longest, pool_tokens=pool_tokens, page_size=PAGE_SIZE, device=run.device
    )  # fmt: skip
    try:
        ways = {"default": Way(runner, KERNELS), "exact": Way(runner, EXACT_KERNELS)}
        tried_tokens = try_exact(runner, ways["exact"])
        fill_pool(runner)
        results: dict[str, Any] = {
            "layers": shape["num_hidden_layers"], "tried_tokens": tried_tokens, "products": [], "steps": []
        }  # fmt: skip
        for rows in run.each(run.choose(ROWS, ROWS, TINY_ROWS)):
            results["products"] += measure_products(runner, rows, run)
            run.keep(results)
        most_rows = max(requests for requests, rows, _ in steps if rows == 1)
        for way in ways.values():
            way.capture(most_rows)
        for requests, rows, context in run.each(steps):
            found = measure_step(runner, ways, (requests, rows, context), run)
            results["steps"].append({"requests": requests, "rows": rows, "context": context, **found})
            run.keep(results)
        run.finish(results, headline(results))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
