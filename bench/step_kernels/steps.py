"""Whole steps of a model over fake CUDA tensors: a prefill chunk, decode, both together, and a captured decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.step_kernels.counting import Counted, DeviceCounter, HostRead, on_device
from services.worker import kernels
from services.worker.engine.attention import ATTENTION_NAME, AttentionCall, attending
from services.worker.engine.decode_shapes import DecodeShape
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.fused.choice import ForwardPath, fuse, merge
from services.worker.engine.model_loading import expected_windows, max_context_tokens
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.pinned_rotations import pin_rotations
from services.worker.engine.probe import LayoutProbe
from services.worker.engine.sampler import SampleRow, sample
from services.worker.engine.states.layers import state_layers
from services.worker.engine.static_batch import StaticBatch, StaticStep
from services.worker.kv.device_pool import DTYPE_NAMES, DevicePool
from shared.errors import UnsupportedModel
from shared.messages.pools import KvGeometry
from shared.messages.requests import SamplingParams

PAGE_SIZE = 16
PAGES = 64
ROWS = 4
"""Requests that decode together."""
CHUNK, CONTEXT = 40, 24
"""Tokens of a prefill chunk, and before it."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """One step. ``read`` is the operator by which the host read the device, if it did: the step was then not counted
    further.
    """

    kernels: int
    uploads: int
    read: str = ""

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph may hold the step: nothing goes between the host and the device in it."""
        return not self.read and not self.uploads


@torch.inference_mode()
def runner_of(model: Any, forward: ForwardPath = "auto") -> ModelRunner:
    """A runner over fake tensors of a real model, or of one on ``meta``, which is changed; within ``counting``.

    Raises UnsupportedModel for one whose steps are not counted.
    """
    config = model.config
    if state_layers(config):
        raise UnsupportedModel("its layers carry states, whose steps are not counted yet")
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    pin_rotations(model, max_context_tokens(config))
    windows = expected_windows(config)
    key = _first_call(model, len(windows)).key
    on_device(model)
    merged = merge(model, windows, max_context_tokens(config), forward)
    geometry = KvGeometry(
        layers=len(windows), kv_heads=key.shape[1], head_dim=key.shape[3], page_size=PAGE_SIZE,
        dtype=DTYPE_NAMES[key.dtype],
    )  # fmt: skip
    storage = torch.empty(PAGES * geometry.page_bytes, dtype=torch.uint8, device="cuda")
    pool = DevicePool(geometry, PAGES, storage)
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    return ModelRunner(model, pool, vocab_size=vocab_size, fused=fuse(model, windows, pool, forward, merged))


def _first_call(model: Any, layers: int) -> AttentionCall:
    """What the first layer asks of attention, found as at load. Raises UnsupportedModel where layers are not alike."""
    probe = LayoutProbe()
    with attending(probe):
        ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
        model(input_ids=ids, position_ids=ids, use_cache=False)
    kept = {(call.key.shape, call.value.shape, call.latents is None) for call in probe.calls}
    if len(probe.calls) != layers or len(kept) != 1 or any(call.key.shape != call.value.shape for call in probe.calls):
        raise UnsupportedModel(
            f"layers of {model.config.model_type} do not all keep K and V alike, as on GPUs they must"
        )
    return probe.calls[0]


@torch.inference_mode()
def count_steps(counter: DeviceCounter, runner: ModelRunner) -> dict[str, StepCounts]:
    """By kind of step. ``captured`` is the decode step of a CUDA graph; nothing may be uploaded or read in it."""
    rows = min(ROWS, PAGES)
    chunk, decodes = [(CHUNK, CONTEXT)], [(1, CONTEXT + row) for row in range(rows)]

    def step(segments: list[tuple[int, int]]) -> Callable[[], object]:
        positions = torch.cat([torch.arange(context, context + count) for count, context in segments])
        last_rows = torch.tensor([count for count, _ in segments]).cumsum(0) - 1
        return lambda: runner.forward(torch.zeros_like(positions), positions, _meta(segments), last_rows)

    return {
        "prefill": _count(counter, step(chunk)),
        "decode": _count(counter, step(decodes)),
        "mixed": _count(counter, step(decodes + chunk)),
        "captured": count_captured(counter, runner, rows, 512),
    }


@torch.inference_mode()
def count_captured(counter: DeviceCounter, runner: ModelRunner, rows: int, length: int) -> StepCounts:
    """The decode step of a CUDA graph for ``rows`` requests of up to ``length`` tokens."""
    shape = DecodeShape(rows, length)
    batch = StaticBatch(rows, PAGES, runner.vocab_size, torch.device("cuda"))
    step = StaticStep(batch, shape, runner.pool, kernels)

    def run() -> None:
        batch.logits.copy_(runner.run(batch.ids, batch.positions, step, batch.last_rows))

    return _count(counter, run)


@torch.inference_mode()
def count_around(counter: DeviceCounter, rows: int, vocab_size: int) -> StepCounts:
    """What is launched around the graph of a decode step of ``rows`` requests, tables of the step being there: its
    inputs' copies into the static batch, and the choice of greedy tokens up to the one read that ends the step.
    """
    batch = StaticBatch(rows, PAGES, vocab_size, torch.device("cuda"))
    table = np.arange(PAGES, dtype=np.int32)
    meta = ForwardMeta.build([Segment(1, CONTEXT, table)] * rows, PAGE_SIZE, "cuda")
    greedy = [SampleRow(SamplingParams(max_tokens=1, temperature=0.0), 0)] * rows

    def run() -> None:
        batch.fill(torch.zeros(rows, dtype=torch.int64), torch.full((rows,), CONTEXT), meta, rows)
        sample(batch.logits[:rows].clone(), greedy)

    return _count(counter, run)


def _meta(segments: list[tuple[int, int]]) -> ForwardMeta:
    each = PAGES // len(segments)
    return ForwardMeta.build(
        [
            Segment(count, context, np.arange(number * each, (number + 1) * each, dtype=np.int32))
            for number, (count, context) in enumerate(segments)
        ],
        PAGE_SIZE,
        "cuda",
    )


def _count(counter: DeviceCounter, step: Callable[[], object]) -> StepCounts:
    counter.counted = Counted()
    read = ""
    try:
        step()
    except HostRead as error:
        read = str(error)
    return StepCounts(counter.counted.total, counter.counted.uploads.total(), read)
