"""Writes K and V of consecutive tokens into their slots of the device pool, as a step does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.kv.device_pool import DevicePool


@dataclass(frozen=True, slots=True)
class KvSlots:
    """Slots of consecutive tokens, int64 [T] on the device.

    ``first`` is the first of them where they are consecutive, else -1.
    """

    slots: torch.Tensor
    first: int

    @classmethod
    def of_segment(cls, segment: Segment, page_size: int, device: torch.device) -> KvSlots:
        """Return the slots of the segment's rows. Raises InvariantViolated if its page table is too short."""
        meta = ForwardMeta.build([segment], page_size, "cpu")
        return cls(meta.slots.to(device), meta.first_slot)

    def write(self, pool: DevicePool, layer: int, key: torch.Tensor, value: torch.Tensor, start: int = 0) -> None:
        """Write key and value [1, kv_heads, N, head_dim] to the slots of rows ``[start, start + N)``."""
        rows = key.shape[2]
        for half, states in ((pool.k(layer), key), (pool.v(layer), value)):
            flat, by_token = half.flatten(0, 1), states[0].transpose(0, 1)
            if self.first >= 0:
                flat[self.first + start : self.first + start + rows].copy_(by_token)
            else:
                flat.index_copy_(0, self.slots[start : start + rows], by_token)
