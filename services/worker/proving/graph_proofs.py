"""Proof of CUDA graphs: what was captured is computed again, over memory that has changed meanwhile."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from services.worker.engine.cuda_capture import Capture, CudaCapture
from services.worker.kv.float8 import to_float8
from services.worker.proving.cases import compare, expected, kinds, make_step, seconds_of, values_of
from services.worker.proving.table import ServedShape, Speed

SEGMENTS = ((1, 0), (1, 300), (1, 1100))
REPEATED = 16
"""Layers of the graph whose replay is timed: each writes K and V and attends, as a decode step does."""


def prove_graphs(shape: ServedShape) -> Speed | None:
    """See the module. Its speed is that of one replay, on the processor's side and the device's together."""
    return prove_capture(shape, CudaCapture(torch.device(shape.device)))


def prove_capture(shape: ServedShape, capture: Capture) -> Speed | None:
    """Prove that a captured write and attention give an oracle's values for inputs that were not there at the
    capture.
    """
    kernels: Any = importlib.import_module("services.worker.kernels")
    step, other = make_step(shape, SEGMENTS), make_step(shape, SEGMENTS, seed=1)
    scaling = shape.geometry.head_dim**-0.5
    settings = {"scaling": scaling, **kinds(shape)[0]}
    page_size = shape.geometry.page_size
    slots = torch.tensor(
        [int(each.pages[each.context // page_size]) * page_size + each.context % page_size for each in step.segments],
        device=step.q.device,
    )
    head_dim = step.q.shape[2]
    rows = [values_of(half.flatten(0, 1)[slots], head_dim).to(step.q.dtype) for half in (step.k, step.v)]
    q, out = step.q.clone(memory_format=torch.contiguous_format), torch.empty_like(step.q)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(REPEATED):
            kernels.kv_write(rows[0], rows[1], step.k, step.v, slots)
            out.copy_(kernels.paged_attention(q, step.k, step.v, step.paged, **settings))

    graph = capture.graph_of(run)
    q.copy_(other.q)
    for mine, theirs in zip(rows, (other.k, other.v), strict=True):
        mine.copy_(values_of(theirs.flatten(0, 1)[slots], head_dim).nan_to_num(nan=0.5))
    out.zero_()
    graph.replay()
    found = out.clone()
    for half, mine in zip((step.k, step.v), rows, strict=True):
        half.flatten(0, 1)[slots] = to_float8(mine) if half.dtype == torch.uint8 else mine
    step.q.copy_(q)
    compare(found, expected(step, **settings), "a replayed graph of attention")
    spent = seconds_of(graph.replay, shape.device, rounds=10)
    return None if spent is None else Speed(value=spent * 1e6, unit=f"us for one launch of {REPEATED} layers")
