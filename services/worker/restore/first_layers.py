"""Recomputation of the first layers alone (HCache section 4.1): a forward pass that ends early.

The last of them needs only its own K and V, so neither its attention nor anything behind it is computed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from services.worker.engine.attention import AttentionCall, AttentionStep
from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment
from services.worker.kv.device_pool import DevicePool
from services.worker.restore.kv_slots import KvSlots
from shared.errors import InvariantViolated
from shared.messages.pools import KvGeometry


class PassRunner(Protocol):
    """The part of ``engine.model_runner.ModelRunner`` that restoring a prefix needs."""

    pool: DevicePool

    @property
    def geometry(self) -> KvGeometry:
        """Geometry of the KV in the runner's pool."""

    def paged_step(self, meta: ForwardMeta) -> AttentionStep:
        """Return an attention step over the pool that writes the KV of ``meta``'s rows and waits for its gate."""

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Run a forward pass over ``ids`` and ``positions``, int64 [T], with ``step`` as its attention.

        Return the logits of ``last_rows``, float32 [R, vocab]. Raises what ``step`` raises.
        """


class _LayersDone(Exception):
    """Ends the forward pass from within attention; every model passes it on."""


class _FirstLayers:
    """An attention step that ends the pass as soon as the last layer's K and V are written."""

    def __init__(self, paged: AttentionStep, pool: DevicePool, slots: KvSlots, layers: int) -> None:
        self._paged, self._pool, self._slots, self._last = paged, pool, slots, layers - 1

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer < self._last:
            return self._paged.attend(call)
        self._slots.write(self._pool, call.layer, call.key, call.value)
        raise _LayersDone


def compute_first_layers(
    runner: PassRunner, ids: torch.Tensor, segment: Segment, layers: int, gate: LayerGate | None = None
) -> None:
    """Write the KV of the first ``layers`` layers of the segment's tokens to their slots.

    ``ids`` are int64 [segment.rows]. KV of these layers before the segment must be in the pool, or come before ``gate``
    lets attention of a layer through; raises what the gate raises. With ``layers`` 0 nothing happens.
    """
    if layers == 0:
        return
    page_size, device = runner.geometry.page_size, runner.pool.device
    if len(ids) != segment.rows or layers > runner.geometry.layers:
        raise InvariantViolated(f"{len(ids)} tokens do not make {segment.rows} rows in {layers} layers")
    meta = ForwardMeta.build([segment], page_size, device, gate)
    slots = KvSlots(meta.slots, meta.first_slot)
    step = _FirstLayers(runner.paged_step(meta), runner.pool, slots, layers)
    try:
        runner.run(ids, torch.arange(segment.context, segment.length), step, torch.empty(0, dtype=torch.int64))
    except _LayersDone:
        return
    raise InvariantViolated(f"a pass through {layers} layers went on to the end")
