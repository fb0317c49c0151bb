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
        """Attention of one step; its result is ``[T, heads, head_dim]``."""


class PooledStep(ABC):
    """An :class:`~services.worker.engine.attention.AttentionStep` whose K and V belong into slots of the pool.

    :meth:`attend` writes them; a forward that writes them itself calls :meth:`attend_written` instead.
    """

    @property
    @abstractmethod
    def slots(self) -> torch.Tensor:
        """int64 [T] on the pool's device: where K and V of each row belong; negative: nowhere."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See ``AttentionStep``."""

    @abstractmethod
    def attend_written(self, call: AttentionCall) -> torch.Tensor:
        """Attend in the same way over a pool that holds the call's K and V already."""


class PagedStep(PooledStep):
    """See the module. All rows of a layer are written before any is read, so a request may use, in the same
    step, a page that another one fills in it.
    """

    def __init__(self, meta: ForwardMeta, pool: DevicePool, backend: AttentionBackend) -> None:
        self._meta = meta
        self._pool = pool
        self._attention = backend.for_step(meta)

    @property
    def slots(self) -> torch.Tensor:
        return self._meta.slots

    def attend(self, call: AttentionCall) -> torch.Tensor:
        write_rows(self._pool.k(call.layer), call.key, self._meta)
        write_rows(self._pool.v(call.layer), call.value, self._meta)
        return self.attend_written(call)

    def attend_written(self, call: AttentionCall) -> torch.Tensor:
        if self._meta.gate is not None:
            self._meta.gate.wait(call.layer)
        return self._attention(call)


def write_rows(half: torch.Tensor, rows: torch.Tensor, meta: ForwardMeta) -> None:
    """Put ``rows`` [1, kv_heads, T, head_dim] of a step into their slots of ``half`` (K or V of one layer), rounded
    where that holds bytes.
    """
    slots, first, new = half.flatten(0, 1), meta.first_slot, rows[0].transpose(0, 1)
    if half.dtype == torch.uint8:
        new = to_float8(new)
    if first >= 0:
        slots[first : first + meta.rows].copy_(new)
    else:
        slots.index_copy_(0, meta.slots, new)
