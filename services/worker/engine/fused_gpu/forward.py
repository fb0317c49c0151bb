"""The fused forward on a GPU: ten launches a layer, or nine where the keys of a decode row are not split.

Norm, queries with keys and values, rotation with the write to the pool, attention, its output, norm, gates, SiLU,
and the way down. Nothing in a step waits for the device or reads from it, so a CUDA graph may hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import embedding, linear

from services.worker.engine.attention import AttentionCall, AttentionStep
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.engine.fused.hooks import Hooks
from services.worker.engine.fused_gpu.weights import GpuModel
from services.worker.engine.paged_step import AttentionBackend, PagedStep, PooledStep
from services.worker.engine.uploads import on_device
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated

Attend = Callable[[AttentionCall], torch.Tensor]


class StepKernels(Protocol):
    """The kernels of ``services.worker.kernels`` that a step uses."""

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """Add ``delta``, if any, to ``x`` [T, width] in place, and write the sum's weighted RMSNorm to ``out``."""

    def rope_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        *,
        heads: tuple[int, int],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> None:
        """Rotate the queries and keys of ``qkv`` in place, normed before where ``norms`` are given.

        With ``pool`` (K, V and slots int64 [T]) keys and values are written there.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate) * up`` [T, width] of ``gate_up`` [T, 2 * width]."""


class GpuForward:
    """The forward pass of a :class:`GpuModel`, in place of that of the Hugging Face model it was made from.

    Not thread-safe. Forward pre-hooks of attention modules are called as that model would call them; other hooks are
    not.
    """

    def __init__(self, model: GpuModel, kernels: StepKernels, pool: DevicePool) -> None:
        """Write K and V to ``pool``, which is on the device of ``model`` and is not closed here.

        ``kernels`` may be the module ``services.worker.kernels``.
        """
        self._model, self._kernels, self._pool = model, kernels, pool

    def paged(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: ForwardMeta,
        attention: AttentionBackend,
        last_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step, see ``ModelRunner.forward``. K and V go straight to the pool of ``attention``."""
        return self.stepped(ids, positions, PagedStep(meta, self._pool, attention), last_rows)

    def stepped(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute a step, see ``ModelRunner.run``. A ``step`` that is no :class:`PooledStep` may keep its tensors."""
        rows = len(ids)
        self._check(ids, self._model.vocabulary, "token")
        self._check(positions, self._model.angles.positions, "position")
        self._check(last_rows, rows, "row of the step")
        ids, positions, last_rows = on_device((ids, positions, last_rows), self._pool.device)
        if not isinstance(step, PooledStep):
            return self._by_layer(ids, positions, step.attend, last_rows, None)
        if step.slots.shape[0] != rows:
            raise InvariantViolated(f"a step of {rows} tokens has {step.slots.shape[0]} slots")
        return self._by_layer(ids, positions, step.attend_written, last_rows, step.slots)

    def _by_layer(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last_rows: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the logits of ``last_rows``. Without ``slots`` keys and values are for ``attend`` alone."""
        model, kernels = self._model, self._kernels
        x = embedding(ids, model.embedding)
        normed = torch.empty_like(x)
        hooks = Hooks(model.attention, normed, positions, model.angles)
        delta: torch.Tensor | None = None
        for layer, weights in enumerate(model.layers):
            kernels.add_rms_norm(x, delta, weights.input_norm, model.eps, normed)
            hooks.call(layer)
            qkv = linear(normed, *weights.qkv)
            kernels.rope_write(
                qkv, positions, model.angles.cosines, model.angles.sines,
                None if slots is None else (self._pool.k(layer), self._pool.v(layer), slots),
                heads=(model.query_heads, model.kv_heads), norms=weights.norms,
            )  # fmt: skip
            attended = attend(AttentionCall(layer, *self._heads(qkv), model.scaling, model.windows[layer], None, {}))
            if layer == len(model.layers) - 1:
                # Nothing reads the last layer's output for other rows, and their keys and values are written.
                x, attended = x.index_select(0, last_rows), attended.index_select(0, last_rows)
                normed = normed.new_empty(x.shape)
            kernels.add_rms_norm(x, linear(attended.flatten(1), *weights.out), weights.post_norm, model.eps, normed)
            delta = linear(kernels.silu_mul(linear(normed, *weights.gate_up)), *weights.down)
        kernels.add_rms_norm(x, delta, model.final_norm, model.eps, normed)
        return linear(normed, model.head).float()

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values as attention takes them.

        They are views of ``qkv`` [T, (query_heads + 2 kv_heads) * head_dim].
        """
        model = self._model
        heads = qkv.view(len(qkv), -1, model.head_dim).transpose(0, 1)[None]
        behind = model.query_heads + model.kv_heads
        return heads[:, : model.query_heads], heads[:, model.query_heads : behind], heads[:, behind:]

    def _check(self, numbers: torch.Tensor, limit: int, what: str) -> None:
        """Raise InvariantViolated for a number outside [0, limit).

        A kernel that reads beyond a table ends the process's use of the GPU. Numbers that are on the device already
        come from this process's own captures and checks, and are not checked: that would wait for the device.
        """
        if numbers.device.type == self._pool.device.type != "cpu" or not len(numbers):
            return
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= limit:
            raise InvariantViolated(f"there is no {what} {least if least < 0 else most}, only {limit}")
