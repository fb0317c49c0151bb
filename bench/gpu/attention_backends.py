"""Decode attention by each backend of a worker, in CUDA graphs: our kernels, and FlashInfer where it is installed.

Both attend to the same pages of one layer. A replay is timed on the device; what FlashInfer plans on the host before
each step is timed apart, once for all layers of a kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import timing
from bench.gpu.attention_peers import Attend, Problem
from services.worker.engine.cuda_capture import Capture
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.flashinfer_graphs import FlashInferGraphs
from services.worker.engine.flashinfer_plans import Planner, unfit
from services.worker.engine.forward_meta import Segment
from services.worker.kv.device_pool import DTYPE_NAMES
from shared.messages.pools import KvGeometry

Figures = dict[str, Any]


@torch.inference_mode()
def measure_backends(problem: Problem, capture: Capture, rounds: int, *, kernels: str) -> dict[str, Figures]:
    """By backend: microseconds of a replay and of planning, GB/s of K and V; or why it is ``absent``, or its ``error``.

    ``kernels`` names our package of them.
    """
    expected, ours = _ours(problem, capture, rounds, kernels)
    return {"triton": ours, "flashinfer": _flashinfer(problem, capture, rounds, expected)}


def _ours(problem: Problem, capture: Capture, rounds: int, kernels: str) -> tuple[torch.Tensor, Figures]:
    package: Any = importlib.import_module(kernels)
    q, out = _query(problem)
    k, v = problem.pool[0], problem.pool[1]
    paged, scaling = problem.paged, problem.heads.dim**-0.5
    graph = capture.graph_of(_into(out, lambda: package.paged_attention(q, k, v, paged, scaling=scaling)))
    seconds = timing.device_seconds(graph.replay, 3 * rounds, problem.device)
    return out.float(), _figures(problem, seconds)


def _flashinfer(problem: Problem, capture: Capture, rounds: int, expected: torch.Tensor) -> Figures:
    heads = problem.heads
    geometry = KvGeometry(
        layers=1, kv_heads=heads.kv, head_dim=heads.dim, page_size=problem.page_size, dtype=DTYPE_NAMES[problem.dtype]
    )
    faults = unfit(geometry, problem.device)
    if faults:
        return {"absent": "; ".join(faults)}
    try:
        graphs = FlashInferGraphs(Planner(geometry, problem.device), problem.batch, problem.table.shape[1])
        return _measured(problem, capture, rounds, expected, graphs)
    except Exception as error:  # What another's package cannot do here is a finding, and ours is measured on.
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _measured(
    problem: Problem, capture: Capture, rounds: int, expected: torch.Tensor, graphs: FlashInferGraphs
) -> Figures:
    """Raises ValueError where it is further from ours than both may be from what is right."""
    shape = DecodeShape(problem.batch, problem.length)
    segments = [Segment(1, problem.context, pages) for pages in problem.table.int().cpu().numpy()]
    q, out = _query(problem)
    k, v = problem.pool[0], problem.pool[1]
    attend, scaling = graphs.of_shape(shape), problem.heads.dim**-0.5
    graphs.plan((), None, shape)
    graph = capture.graph_of(_into(out, lambda: attend(q, k, v, scaling=scaling)))
    graphs.plan(segments, None, shape)
    graph.replay()
    deviation = (out.float() - expected).abs().max().item()
    if not deviation <= 4e-2 * (1 + expected.abs().max().item()):
        raise ValueError(f"its attention is not ours: off by {deviation:.3g}")
    seconds = timing.device_seconds(graph.replay, 3 * rounds, problem.device)
    planning = timing.wall_seconds(lambda: graphs.plan(segments, None, shape), 3 * rounds, problem.device)
    return _figures(problem, seconds) | {"plan_us": planning * 1e6, "deviation": deviation}


def _query(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """One row a request, [batch, heads, dim], and where its result goes."""
    q = problem.query[:, :, 0].contiguous()
    return q, torch.empty_like(q)


def _into(out: torch.Tensor, attend: Attend) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        out.copy_(attend())

    return run


def _figures(problem: Problem, seconds: float) -> Figures:
    return {"graph_us": seconds * 1e6, "gb_s": problem.kv_bytes / seconds / 1e9}
