"""Decode steps as CUDA graphs: one launch in place of the thousand or so that a step consists of.

Launching takes the processor longer than a GPU takes to compute a small step. A graph is captured once for each of a
bounded number of shapes (:mod:`services.worker.engine.decode_shapes`), before any request is admitted, over memory that
stays where it is (:mod:`services.worker.engine.static_batch`), and its logits are compared with those of an ordinary
step before it serves. Other steps than plain decode are computed without a graph: chunks, loads behind a gate, hidden
states that hooks record, sparse prefixes. So are the steps of a model that cannot be captured.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.engine.adapters import Adapters
from services.worker.engine.attention import AttentionStep
from services.worker.engine.captured_attention import CapturedAttention
from services.worker.engine.cuda_capture import Capture, CudaCapture, Graph
from services.worker.engine.decode_shapes import DecodeShape, decode_shapes, smallest
from services.worker.engine.forward_meta import ForwardMeta, Segment, host_tiles, pages_for
from services.worker.engine.states.captured import SlottedSteps, StaticStates
from services.worker.engine.states.layers import carrying
from services.worker.engine.static_batch import Kernels, StaticBatch, StaticStep
from services.worker.engine.static_planes import StaticPlanesStep
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated
from shared.logs import get_logger

_log = get_logger("worker.engine")

MOST_BYTES = 2 * 2**30
"""Device memory that graphs may take beside the pool. When it is reached, the remaining shapes get no graph."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest mean deviation of a row of logits from an ordinary step's, relative to the row's spread. Padding may have
matrices multiplied by another kernel, which rounds otherwise; a step that reads a wrong slot gives values near 1.
"""


_CHECKED_STATES = 4
"""Rows with states in the step by which a graph is checked: their states are kept beside the pool meanwhile, which has
nearly all of the device's memory, and may be a hundred megabytes each. The others are padding.
"""


class GraphedRunner(Protocol):
    """The part of ``engine.model_runner.ModelRunner`` that graphs use."""

    pool: DevicePool
    max_context: int
    vocab_size: int

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters, whose hooks no captured step misses."""

    @property
    def is_exact(self) -> bool:
        """Whether a row has the same bits in any step."""

    @property
    def model(self) -> Any:
        """The Hugging Face model, whose modules may have hooks."""

    @property
    def slotted_steps(self) -> SlottedSteps | None:
        """The slots around captured steps; None for a model without states."""

    def ordinary(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of ``last_rows``, float32 [R, vocab], of a step over the pool without graphs."""

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of ``last_rows``, float32 [R, vocab], with the attention of ``step``."""


class DecodeGraphs:
    """The graphs of one runner, for up to ``most_rows`` requests. Capturing them overwrites pages of the pool."""

    def __init__(
        self,
        runner: GraphedRunner,
        most_rows: int,
        *,
        capture: Capture,
        kernels: Kernels,
        attention: CapturedAttention | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Capture all shapes; without ``attention`` graphs attend by ``kernels``.

        A model that cannot be captured raises nothing: then no step has a graph, and ``fault`` says why.
        """
        geometry = runner.pool.geometry
        self._runner, self._kernels, self._attention = runner, kernels, attention
        self._longest = longest_served(runner)
        self._graphs: dict[DecodeShape, Graph] = {}
        self.fault = ""  # Why there are no graphs, or no more of them.
        self._modules = list(runner.model.modules())
        self._order = torch.arange(most_rows)
        pages = pages_for(self._longest, geometry.page_size)
        began_s, before = time.monotonic(), capture.used_bytes()
        self._states = runner.slotted_steps
        padding = None if self._states is None else self._states.padding
        self._batch = StaticBatch(most_rows, pages, runner.vocab_size, runner.pool.device, padding_slot=padding)
        shapes = decode_shapes if attention is None else attention.shapes
        for shape in shapes(most_rows, self._longest):
            if capture.used_bytes() - before > most_bytes:
                _log.warning("decode_graphs_left_out", rows=shape.rows, length=shape.length, most_bytes=most_bytes)
                break
            try:
                graph = capture.graph_of(self._run_of(shape))
                self._check(shape, graph)
            except (RuntimeError, InvariantViolated) as error:
                _log.warning("decode_graph_unavailable", rows=shape.rows, length=shape.length, reason=str(error))
                self.fault = f"none from {shape.rows} rows and {shape.length} tokens on: {error}"
                break
            self._graphs[shape] = graph
        self._hooks = self._count_hooks()
        _log.info(
            "decode_graphs",
            graphs=len(self._graphs),
            nbytes=max(0, capture.used_bytes() - before),
            seconds=round(time.monotonic() - began_s, 2),
        )

    @property
    def shapes(self) -> list[DecodeShape]:
        """The shapes that have a graph."""
        return list(self._graphs)

    def replay(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the logits of a step, float32 [R, vocab], as ``ModelRunner.forward`` gives them.

        Return None, with nothing computed, where no graph serves it.
        """
        shape = self.shape_for(meta, last_rows)
        if shape is None:
            return None
        self._compute(shape, self._graphs[shape], ids, positions, meta)
        return self._batch.logits[: meta.rows].clone()  # The memory is the next step's.

    def shape_for(self, meta: ForwardMeta, last_rows: torch.Tensor) -> DecodeShape | None:
        """Return the shape whose graph serves a step, or None.

        A graph serves steps of one row a request, all of whose logits are wanted, without a gate or new hooks.
        """
        is_decode = len(meta.segments) == meta.rows == len(last_rows)
        if not is_decode or meta.gate is not None or not self._graphs:
            return None
        if self._states is not None and not self._states.serves(meta.segments):
            return None
        longest = max(segment.length for segment in meta.segments)
        shape = self._sharing(meta, longest)
        shape = shape or smallest((each for each in self._graphs if not each.shares), meta.rows, longest)
        if shape is None or not torch.equal(last_rows.cpu(), self._order[: meta.rows]):
            return None
        # A graph calls no module, so hooks on modules would not be called.
        return shape if self._count_hooks() == self._hooks else None

    def _sharing(self, meta: ForwardMeta, longest: int) -> DecodeShape | None:
        """Return a shape that attends in a launch of its own to keys that the step's requests share.

        Return None where there is no such shape, or no key is shared.
        """
        sharing = [each for each in self._graphs if each.shares]
        if not sharing or host_tiles(meta) is None:
            return None
        return smallest(sharing, meta.rows, longest)

    def _compute(
        self, shape: DecodeShape, graph: Graph, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta
    ) -> None:
        """Compute a step of single rows by a graph, into the logits of the static batch."""
        if self._attention is not None:
            self._attention.plan(meta.segments, host_tiles(meta) if shape.shares else None, shape)
        self._batch.fill(ids, positions, meta, shape.rows)
        if self._states is not None:
            self._states.bring(meta.segments)
        graph.replay()
        if self._states is not None:
            self._states.keep(meta.segments)

    def _run_of(self, shape: DecodeShape) -> Callable[[], None]:
        """Return a function that computes a step of this shape over the static batch, into its logits."""
        batch, rows = self._batch, shape.rows
        attend = None
        if self._attention is not None:
            attend = self._attention.of_shape(shape)
            self._attention.plan((), None, shape)  # Padding alone, for kinds of layers that other shapes have met.
        step: AttentionStep
        if self._runner.pool.planes.is_identity:
            step = StaticStep(batch, shape, self._runner.pool, self._kernels, attend)
        else:
            step = StaticPlanesStep(batch, shape, self._runner.pool, self._kernels)
        batch.clear()
        states = None
        if self._states is not None and batch.running is not None:
            states = StaticStates(self._states.slots, batch.running[:rows])

        @torch.inference_mode()
        def run() -> None:
            with nullcontext() if states is None else carrying(states):
                logits = self._runner.run(batch.ids[:rows], batch.positions[:rows], step, batch.last_rows[:rows])
            batch.logits[:rows].copy_(logits)

        return run

    @torch.inference_mode()
    def _check(self, shape: DecodeShape, graph: Graph) -> None:
        """Raise InvariantViolated unless a graph gives the logits of an ordinary step.

        The step has one row of padding where the graph has two or more. Its requests share one page table, at different
        lengths.
        """
        pool = self._runner.pool
        longest = min(shape.length, self._longest)
        rows = min(max(1, shape.rows - 1), longest)
        table = np.arange(pool.pages, dtype=np.int32)
        contexts = [max(1, longest - 1 - row * (longest // rows)) for row in range(rows)]
        segments = [Segment(1, context, table, running=row) for row, context in enumerate(contexts)]
        if self._states is not None:
            segments = self._begun(self._states, segments)
            rows = len(segments)
        meta = ForwardMeta.build(segments, pool.geometry.page_size, pool.device)
        ids = torch.arange(rows) * 7919 % self._runner.vocab_size
        positions = torch.tensor(contexts[:rows])
        before = None if self._states is None else self._states.slots[:rows].clone()
        expected = self._runner.ordinary(ids, positions, meta, torch.arange(rows))
        if self._states is not None and before is not None:
            self._states.slots[:rows].copy_(before)
        self._compute(shape, graph, ids, positions, meta)
        spread = expected.std(dim=-1, keepdim=True).clamp_min(1e-12)
        found = self._batch.logits[:rows]
        deviation = ((found - expected) / spread).square().mean(dim=-1).sqrt().mean().item()
        if not deviation <= (0.0 if self._runner.is_exact else _TOLERANCE[self._runner.model.dtype]):
            raise InvariantViolated(f"the captured step gives other logits: mean relative deviation {deviation:.2g}")

    def _begun(self, states: SlottedSteps, segments: list[Segment]) -> list[Segment]:
        """Return those of ``segments`` that a graph serves together, with the states of a first token in their slots.

        Only these have to be what a model leaves: other numbers might overflow.
        """
        served = segments[: min(states.padding, _CHECKED_STATES)]
        if not states.serves(served):
            served = served[:1]
        firsts = [replace(segment, context=0) for segment in served]
        meta = ForwardMeta.build(firsts, self._runner.pool.geometry.page_size, self._runner.pool.device)
        rows = len(firsts)
        ids = torch.arange(rows) * 7907 % self._runner.vocab_size
        self._runner.ordinary(ids, torch.zeros(rows, dtype=torch.int64), meta, torch.arange(rows))
        return served

    def _count_hooks(self) -> int:
        """Return the hooks on modules that any step would call: steps with rows of an adapter have no graph."""
        hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in self._modules)
        return hooks - self._runner.adapters.hooks


def longest_served(runner: GraphedRunner) -> int:
    """Return the tokens of the longest request that the runner's pool can hold."""
    return min(runner.max_context, runner.pool.pages * runner.pool.geometry.page_size)


def capture_decode(
    runner: GraphedRunner, most_rows: int, kernels_name: str, attention: CapturedAttention | None = None
) -> DecodeGraphs:
    """Capture the graphs of a runner on a GPU, before it has any request, over a package of kernels."""
    # Imported here because it pulls in Triton, which machines without a GPU need not have.
    kernels: Any = importlib.import_module(kernels_name)
    capture = CudaCapture(runner.pool.device)
    return DecodeGraphs(runner, most_rows, capture=capture, kernels=kernels, attention=attention)
