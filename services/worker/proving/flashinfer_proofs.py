"""Proofs of FlashInfer: ordinary steps as every backend is proven, then a captured one, replayed for other steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.worker.engine.captured_attention import CapturedAttention, PagedAttend
from services.worker.engine.cuda_capture import Capture, CudaCapture
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.flashinfer_attention import FlashInferSteps
from services.worker.engine.flashinfer_graphs import FlashInferGraphs
from services.worker.engine.flashinfer_plans import Planner, unfit, unfit_layers
from services.worker.engine.forward_meta import Segment, pages_for, tiles_of
from services.worker.engine.shared_prefixes import SharedTiles
from services.worker.proving.attention_proofs import prove_attention
from services.worker.proving.cases import SHARED_STEP, SHARED_TOKENS, Step, compare, expected, kinds, make_step
from services.worker.proving.part import WayAbsent, WrongResult
from services.worker.proving.table import ServedShape, Speed

ROWS = 8
"""Rows of the captured step, one more than the steps that are replayed have."""


def prove_flashinfer(shape: ServedShape) -> Speed | None:
    """Prove ordinary and captured steps. The speed is that of ordinary steps, without the time to plan them."""
    return prove_steps_and_graphs(shape, CudaCapture)


def prove_steps_and_graphs(shape: ServedShape, capture: Callable[[torch.device], Capture]) -> Speed | None:
    """Prove steps and graphs. Raises WayAbsent with every reason, WrongResult, and any error of FlashInfer."""
    device = torch.device(shape.device)
    faults = unfit_layers(has_sinks=shape.has_sinks, has_chunks=bool(shape.chunks)) + unfit(shape.geometry, device)
    if not shape.is_uniform:
        faults.append("not all layers keep K and V of the same heads, as its pools do")
    if faults:
        raise WayAbsent("; ".join(faults))
    planner = Planner(shape.geometry, device)
    attend_step = FlashInferSteps(planner).for_step
    planned: list[tuple[Step, PagedAttend]] = []

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        if not planned or planned[-1][0] is not step:
            planned.append((step, attend_step(step.segments, tiles_of(step.segments, shape.geometry.page_size))))
        return planned[-1][1](step.q, step.k, step.v, **settings)

    speed = prove_attention(shape, attend)
    step = make_step(shape, SHARED_STEP[: ROWS - 1], shared_tokens=SHARED_TOKENS)
    longest = max(segment.length for segment in step.segments)
    graphs = FlashInferGraphs(planner, ROWS, pages_for(longest, shape.geometry.page_size))
    for kind in kinds(shape):
        prove_captured(shape, step, graphs, capture(device), window=kind["window"], softcap=kind["softcap"])
    return speed


def prove_captured(
    shape: ServedShape,
    step: Step,
    graphs: CapturedAttention,
    capture: Capture,
    *,
    window: int | None,
    softcap: float | None,
) -> None:
    """Prove that graphs of both kinds, captured over padding, give an oracle's values.

    They do so for the rows of ``step``, for some of them in another order, and for a step with one row that shares
    nothing. Raises WrongResult.
    """
    settings: dict[str, Any] = {
        "scaling": shape.geometry.head_dim**-0.5, "window": window, "softcap": softcap,
    }  # fmt: skip
    longest = max(segment.length for segment in step.segments)
    tiles = tiles_of(step.segments, shape.geometry.page_size)
    if tiles is None:
        raise WrongResult("no requests of the proof share a prefix")
    alone = SharedTiles(np.where(tiles.tile_rows == 2, np.int32(-1), tiles.tile_rows), tiles.tile_keys)
    turned = _turned(step)
    for graph_shape in (DecodeShape(ROWS, longest), DecodeShape(ROWS, longest, shares=True)):
        q = torch.zeros((ROWS, *step.q.shape[1:]), dtype=step.q.dtype, device=step.q.device)
        out = torch.empty_like(q)
        attend = graphs.of_shape(graph_shape)

        @torch.inference_mode()
        def run(attend: PagedAttend = attend, q: torch.Tensor = q, out: torch.Tensor = out) -> None:
            out.copy_(attend(q, step.k, step.v, **settings))

        graphs.plan((), None, graph_shape)
        graph = capture.graph_of(run)
        for replayed, shared in ((step, tiles), (turned, None), (step, alone)):
            rows = len(replayed.segments)
            graphs.plan(replayed.segments, shared if graph_shape.shares else None, graph_shape)
            q[:rows].copy_(replayed.q)
            out.zero_()
            graph.replay()
            what = f"a replayed graph of attention with window {window or 'none'}{' in two parts' * graph_shape.shares}"
            compare(out[:rows], expected(replayed, **settings), what)


def _turned(step: Step) -> Step:
    """Return three requests of a step in another order, one of them cut short."""
    numbers = [4, 0, 2]
    segments = [step.segments[number] for number in numbers]
    segments[1] = Segment(1, 3, segments[1].pages)
    return replace(step, q=step.q[numbers], segments=tuple(segments))
