"""Proof of CUDA graphs: a captured step is computed again, over memory that has changed meanwhile."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from services.worker.engine.cuda_capture import Capture, CudaCapture
from services.worker.kv.float8 import to_float8
from services.worker.proving.cases import (
    Step,
    attended,
    attended_latents,
    compare,
    kinds,
    make_step,
    oracle_of,
    seconds_of,
    values_of,
)
from services.worker.proving.table import ServedShape, Speed

SEGMENTS = ((1, 0), (1, 300), (1, 1100))
REPEATED = 16
"""Layers of the graph whose replay is timed: each writes K and V and attends, as a decode step does."""


def prove_graphs(shape: ServedShape) -> Speed | None:
    """Prove graphs. The speed is that of one replay, on the processor's side and the device's together."""
    return prove_capture(shape, CudaCapture(torch.device(shape.device)))


def prove_capture(shape: ServedShape, capture: Capture) -> Speed | None:
    """Prove that a captured write and attention give an oracle's values for inputs written after the capture.

    This holds for each kind of K and V and of latents. The speed is that of the last kind.
    """
    kernels: Any = importlib.import_module("services.worker.kernels")

    def heads(step: Step, rows: Sequence[torch.Tensor], slots: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        kernels.kv_write(rows[0], rows[1], step.k, step.v, slots)
        found: torch.Tensor = kernels.paged_attention(step.q, step.k, step.v, step.paged, **settings)
        return found

    def latents(
        rank: int, step: Step, rows: Sequence[torch.Tensor], slots: torch.Tensor, settings: dict[str, Any]
    ) -> torch.Tensor:
        kernels.latent_write(rows[0], step.k, slots)
        found: torch.Tensor = kernels.latent_attention(step.q, step.k, step.paged, rank=rank, **settings)
        return found

    speeds = [_prove_kind(each, capture, heads) for each in attended(shape)]
    speeds += [_prove_kind(each, capture, partial(latents, each.latents[0].rank)) for each in attended_latents(shape)]
    return speeds[-1]


def _prove_kind(shape: ServedShape, capture: Capture, compute: Callable[..., torch.Tensor]) -> Speed | None:
    """Prove a graph of ``compute``, which writes rows into slots, and attends."""
    step, other = make_step(shape, SEGMENTS), make_step(shape, SEGMENTS, seed=1)
    settings = {"scaling": shape.geometry.head_dim**-0.5, **kinds(shape)[0]}
    page_size = shape.geometry.page_size
    slots = torch.tensor(
        [int(each.pages[each.context // page_size]) * page_size + each.context % page_size for each in step.segments],
        device=step.q.device,
    )
    head_dim = step.q.shape[2]
    rows = [values_of(_in_slots(half, slots), head_dim).to(step.q.dtype) for half in (step.k, step.v)]
    step = replace(step, q=step.q.clone(memory_format=torch.contiguous_format))
    out = torch.empty_like(oracle_of(shape, step, **settings), dtype=step.q.dtype, device=step.q.device)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(REPEATED):
            out.copy_(compute(step, rows, slots, settings))

    graph = capture.graph_of(run)
    step.q.copy_(other.q)
    for mine, theirs in zip(rows, (other.k, other.v), strict=True):
        mine.copy_(values_of(_in_slots(theirs, slots), head_dim).nan_to_num(nan=0.5))
    out.zero_()
    graph.replay()
    found = out.clone()
    pages = slots // page_size, slots % page_size
    for half, mine in zip((step.k, step.v), rows, strict=True):
        half[pages] = to_float8(mine) if half.dtype == torch.uint8 else mine
    compare(found, oracle_of(shape, step, **settings), "a replayed graph of attention")
    spent = seconds_of(graph.replay, shape.device, rounds=10)
    return None if spent is None else Speed(value=spent * 1e6, unit=f"us for one launch of {REPEATED} layers")


def _in_slots(half: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of K or V in ``slots``."""
    page_size = half.shape[1]
    return half[slots // page_size, slots % page_size]
