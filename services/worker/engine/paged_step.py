"""One step in service: write the new K and V into the pool, wait for the layer's loads, attend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch

from services.worker.engine.attention import AttentionCall
from services.worker.engine.forward_meta import ForwardMeta
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.float8 import to_float8


class AttentionBackend(Protocol):
    """Attention over a pool that already holds the step's own K and V."""

    def for_step(self, meta: ForwardMeta) -> Callable[[AttentionCall], torch.Tensor]:
        """Return the attention of one step, which is called for each layer and gives ``[T, heads, value_dim]``."""


class PooledStep(ABC):
    """An :class:`~services.worker.engine.attention.AttentionStep` that keeps K and V in slots of the pool.

    :meth:`attend` writes them; a forward that writes them itself calls :meth:`attend_written` instead.
    """

    @property
    @abstractmethod
    def slots(self) -> torch.Tensor:
        """The slot of each row's K and V, int64 [T] on the pool's device; a negative one is not written."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the call's K and V into their slots, then attend; see ``AttentionStep``."""

    @abstractmethod
    def attend_written(self, call: AttentionCall) -> torch.Tensor:
        """Attend in the same way over a pool that holds the call's K and V already."""


class PagedStep(PooledStep):
    """An ordinary step: write, wait for the layer's loads, attend by a backend.

    All rows of a layer are written before any is read, so a request may use, in the same step, a page that another one
    fills in it.
    """

    def __init__(self, meta: ForwardMeta, pool: DevicePool, backend: AttentionBackend) -> None:
        """Have ``backend``, which attends over ``pool``, prepare the step that ``meta`` describes."""
        self._meta = meta
        self._pool = pool
        self._attention = backend.for_step(meta)

    @property
    def slots(self) -> torch.Tensor:
        """The step's slots, int64 [T], all of them real."""
        return self._meta.slots

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the call's K and V into their slots, wait for the layer's loads, and attend."""
        write_rows(self._pool.k(call.layer), call.key, self._meta)
        write_rows(self._pool.v(call.layer), call.value, self._meta)
        return self.attend_written(call)

    def attend_written(self, call: AttentionCall) -> torch.Tensor:
        """Wait for the layer's loads, and attend. Raises whatever the gate raises."""
        if self._meta.gate is not None:
            self._meta.gate.wait(call.layer)
        return self._attention(call)


def write_rows(half: torch.Tensor, rows: torch.Tensor, meta: ForwardMeta) -> None:
    """Write ``rows`` [1, kv_heads, T, head_dim] of a step into their slots of ``half`` (K or V of one layer).

    They are rounded to codes where the pool holds bytes.
    """
    slots, first, new = half.flatten(0, 1), meta.first_slot, rows[0].transpose(0, 1)
    if half.dtype == torch.uint8:
        new = to_float8(new)
    if first >= 0:
        slots[first : first + meta.rows].copy_(new)
    else:
        slots.index_copy_(0, meta.slots, new)
