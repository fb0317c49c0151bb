"""The fused forward: one native call from the attention of a layer to that of the next, or one for all layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.adapters import AdapterRows
from services.worker.engine.attention import AttentionCall, AttentionStep
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, LayerGate
from services.worker.engine.fused.decode_steps import DecodeSteps
from services.worker.engine.fused.hooks import Hooks, are_any
from services.worker.engine.fused.last_layer import LastLayer, last_layer
from services.worker.engine.fused.model import FusedModel
from services.worker.engine.fused.rotations import Rotations
from services.worker.engine.fused.terms import FusedTerms, StepTerms
from services.worker.engine.paged_step import AttentionBackend
from services.worker.kv.device_pool import DevicePool
from services.worker.native.fused import FusedKernels, StepStruct
from shared.errors import InvariantViolated

Attend = Callable[[AttentionCall], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of steps of up to ``len(x)`` rows, used again by every step."""

    x: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor


class FusedForward:
    """The forward pass of a :class:`FusedModel`, in place of that of the Hugging Face model it was made from.

    Not thread-safe. Forward pre-hooks of attention modules are called as that model would call them; other hooks are
    not.
    """

    def __init__(self, model: FusedModel, kernels: FusedKernels, pool: DevicePool) -> None:
        """Write K and V to ``pool``, which is in host memory and is not closed here.

        ``kernels`` are those that ``model`` was made with.
        """
        self._model, self._kernels, self._pool = model, kernels, pool
        self._rotations = Rotations(model.rotary, kernels.dtype)
        self._terms = FusedTerms(model)
        self._width = (model.query_heads + 2 * model.kv_heads) * model.head_dim
        self._buffers = self._make_buffers(0)
        self._decode_steps: list[DecodeSteps | None] = []  # Empty until the first step brings its attention.

    def paged(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        attention: AttentionBackend,
        last_rows: torch.Tensor,
        adapted: Sequence[AdapterRows] = (),
    ) -> torch.Tensor:
        """Compute a step, see ``ModelRunner.forward``.

        K and V are written straight to the pool that ``attention`` reads. ``adapted`` are the rows of adapters.
        """
        terms = self._terms.of_step(len(ids), adapted)
        ids, positions, last_rows, slots = map(_plain, (ids, positions, last_rows, meta.slots))
        gate = meta.gate
        self._check(slots, self._pool.pages * self._pool.geometry.page_size, "slot of the pool")
        if len(slots) != len(ids):
            raise InvariantViolated(f"a step of {len(ids)} tokens has {len(slots)} slots")
        only_decode = meta.rows == len(meta.segments)
        if only_decode and gate is None and not are_any(self._model.attention):
            decode = self._decode_with(attention)
            if decode is not None:
                step = self._begin(ids, positions, last_rows, slots, terms)
                decode.compute(meta, step, self._buffers.qkv)
                return self._finish(step, last_rows)
        left, last = last_layer(meta, last_rows), None
        if left is not None:
            attend = attention.for_step(left.meta) if left.meta is not None else _attend_to_nothing
            last = left, _behind(gate, attend)
        attend = _behind(gate, attention.for_step(meta))
        return self._by_layer(ids, positions, attend, last_rows, slots, last=last, terms=terms)

    def stepped(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a step, see ``ModelRunner.run``. ``step`` may keep the tensors of its calls."""
        ids, positions, last_rows = map(_plain, (ids, positions, last_rows))
        return self._by_layer(ids, positions, step.attend, last_rows, None, step)

    def _by_layer(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last_rows: torch.Tensor,
        slots: torch.Tensor | None,
        step: AttentionStep | None = None,
        last: tuple[LastLayer, Attend] | None = None,
        terms: StepTerms | None = None,
    ) -> torch.Tensor:
        """Compute a step layer by layer.

        ``last`` is the part of the last layer that has to be computed, if that is not all of it, and the attention
        there; ``terms`` are those of adapters.
        """
        model, between, rows = self._model, self._kernels.between, len(ids)
        struct = self._begin(ids, positions, last_rows, slots, terms)
        hooks = Hooks(model.attention, self._buffers.normed[:rows], positions, self._rotations)
        shape, this = model.shape, ctypes.addressof(struct)
        ended: int | None = None
        attended_at = k_pool = v_pool = 0
        qkv, heads = self._buffers.qkv, self._heads(self._buffers.qkv[:rows])
        for layer, begun in enumerate(model.layers):
            if slots is None:
                qkv = qkv.new_empty(rows, self._width)
                heads = self._heads(qkv)
            else:
                k_pool, v_pool = self._pool.k(layer).data_ptr(), self._pool.v(layer).data_ptr()
            between(shape, ended, begun, this, attended_at, qkv.data_ptr(), k_pool, v_pool)
            hooks.call(layer)
            if last is not None and layer == len(model.layers) - 1:
                # K and V of all rows are written; most rows are not needed further.
                left, attend = last
                kept_x, kept_qkv = self._buffers.x[left.rows], qkv[left.rows]
                struct.rows, struct.x = len(kept_x), kept_x.data_ptr()
                last_rows, heads = left.last_rows, self._heads(kept_qkv)
                if terms is not None:
                    terms.tell(struct, left.rows)
            attended = attend(AttentionCall(layer, *heads, model.scaling, model.windows[layer], None, {})).contiguous()
            attended_at, ended = attended.data_ptr(), begun
        if len(last_rows):
            between(shape, ended, None, this, attended_at, None, None, None)
        return self._finish(struct, last_rows)

    def _begin(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        last_rows: torch.Tensor,
        slots: torch.Tensor | None,
        terms: StepTerms | None,
    ) -> StepStruct:
        """Embed ``ids``. The structure's pointers are valid until the next step, and while the arguments are."""
        model, rotations, rows = self._model, self._rotations, len(ids)
        rotations.cover(positions)
        self._check(positions, len(rotations.cosines), "position")
        self._check(last_rows, rows, "row of the step")
        if len(self._buffers.x) < rows:
            self._buffers = self._make_buffers(rows)
        buffers = self._buffers
        buffers.x[:rows] = model.embedding(ids)
        step = StepStruct(
            rows,
            torch.get_num_threads(),
            buffers.x.data_ptr(),
            buffers.normed.data_ptr(),
            rotations.cosines.data_ptr(),
            rotations.sines.data_ptr(),
            positions.data_ptr(),
            None if slots is None else slots.data_ptr(),
            self._kernels.scratch(model.inputs, model.intermediate),
            model.layers[0],
        )
        if terms is not None:
            terms.tell(step)
        return step

    def _finish(self, step: StepStruct, last_rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``last_rows``, float32 [R, vocabulary]."""
        model, rows = self._model, len(last_rows)
        logits = torch.empty(rows, model.vocabulary)
        if rows:
            normed = torch.empty(rows, model.hidden, dtype=self._kernels.dtype)
            self._kernels.logits(
                model.shape,
                model.head,
                model.final_norm,
                ctypes.addressof(step),
                last_rows.data_ptr(),
                rows,
                normed.data_ptr(),
                logits.data_ptr(),
                model.vocabulary,
            )
        return logits

    def _decode_with(self, attention: AttentionBackend) -> DecodeSteps | None:
        """Return whole decode steps with the kernel that ``attention`` decodes with; None where it has none."""
        if not self._decode_steps:
            native = attention.kernels(self._model.query_heads)[0] if isinstance(attention, CpuAttention) else None
            self._decode_steps.append(
                None if native is None else DecodeSteps(self._model, self._kernels, self._pool, native)
            )
        return self._decode_steps[0]

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values as attention takes them.

        They are views of ``qkv`` [T, (query_heads + 2 kv_heads) * head_dim].
        """
        model = self._model
        heads = qkv.view(len(qkv), self._width // model.head_dim, model.head_dim).transpose(0, 1)[None]
        behind = model.query_heads + model.kv_heads
        return heads[:, : model.query_heads], heads[:, model.query_heads : behind], heads[:, behind:]

    def _check(self, numbers: torch.Tensor, limit: int, what: str) -> None:
        """Raise InvariantViolated for a number outside [0, limit): kernels do not check where they read and write."""
        outside = self._kernels.first_outside(numbers, limit)
        if outside >= 0:
            raise InvariantViolated(f"there is no {what} {int(numbers[outside])}, only {limit}")

    def _make_buffers(self, rows: int) -> _Buffers:
        hidden, dtype = self._model.hidden, self._kernels.dtype
        return _Buffers(
            torch.empty(rows, hidden, dtype=dtype),
            torch.empty(rows, hidden, dtype=dtype),
            torch.empty(rows, self._width, dtype=dtype),
        )


def _behind(gate: LayerGate | None, attend: Attend) -> Attend:
    """Return attention that first waits for the loads of its layer."""
    if gate is None:
        return attend

    def attend_behind_gate(call: AttentionCall) -> torch.Tensor:
        gate.wait(call.layer)
        return attend(call)

    return attend_behind_gate


def _attend_to_nothing(call: AttentionCall) -> torch.Tensor:
    """Return the attention of no rows."""
    return call.query[0].transpose(0, 1)


def _plain(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``numbers`` as the kernels read them: int64 and contiguous."""
    return numbers.to(torch.int64).contiguous()
