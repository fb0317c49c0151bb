"""The device pool of a group: parts in every rank that together hold whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import TORCH_DTYPES, DevicePool
from services.worker.kv.page_memory import PageMemory
from services.worker.kv.planes import identity_map
from shared.errors import InvariantViolated
from shared.memory.cuda_ipc import open_halves
from shared.memory.device_pool_view import check_device_handle
from shared.memory.segment import SharedSegment
from shared.messages.pools import KvGeometry, PoolHandle, PoolPart


def attach_part(handle: PoolHandle) -> DevicePool:
    """Return the part of another rank, mapped by rank 0 to be written. Closing it removes its name too, which a rank
    that was killed has left behind. Raises TransportError.
    """
    check_device_handle(handle)
    if handle.kind == "shm":
        segment = SharedSegment.attach(handle.name, handle.nbytes, writable=True)
        return DevicePool(handle.geometry, handle.pages, torch.from_numpy(segment.array), segment)
    halves: Any = open_halves(handle, torch)
    return DevicePool(handle.geometry, handle.pages, halves.view(-1))


class GroupPool(DevicePool):
    """Page p is page p of every part. It tells others how to map the parts, and has no bytes that could be seen as a
    whole: attention of a rank goes over that rank's part, and movers go over all of them (``parts_mover``).
    """

    def __init__(
        self, geometry: KvGeometry, parts: Sequence[tuple[range, DevicePool]], for_cell: Sequence[PoolHandle]
    ) -> None:
        """``parts`` in the order of the ranks, with the KV heads that each has; ``for_cell`` are their handles."""
        self.geometry = geometry
        self.planes = identity_map(geometry)
        self.parts = list(parts)
        self.pages = self.parts[0][1].pages
        self.device = self.parts[0][1].device
        self._for_cell = list(for_cell)

    @property
    def tensor(self) -> torch.Tensor:
        self._refuse()

    def k(self, layer: int) -> torch.Tensor:
        self._refuse()

    def v(self, layer: int) -> torch.Tensor:
        self._refuse()

    def rows(self, layer: int, half: int, slots: torch.Tensor) -> torch.Tensor:
        """See :meth:`DevicePool.rows`: the heads of all parts side by side, on the device of rank 0. A step has to have
        ended, with its last exchange behind what every rank has written.
        """
        width, seen = self.geometry.head_dim, 0
        whole = torch.empty(
            (len(slots), self.geometry.kv_heads * width), dtype=TORCH_DTYPES[self.geometry.dtype], device=self.device
        )
        for heads, pool in self.parts:
            if heads.start < seen:
                continue  # With more ranks than KV heads, neighbours have the same.
            seen = heads.stop
            whole[:, heads.start * width : heads.stop * width] = pool.rows(layer, half, slots.to(pool.device))
        return whole

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        self._refuse()

    def memory(self) -> PageMemory:
        self._refuse()

    def handle(self) -> PoolHandle:
        """How another process maps this pool, part by part."""
        if not self.parts:
            raise InvariantViolated("the device pool is closed")
        first = self._for_cell[0]
        return PoolHandle(
            kind=first.kind,
            layout=first.layout,
            name="",
            nbytes=sum(handle.nbytes for handle in self._for_cell),
            pages=self.pages,
            geometry=self.geometry,
            parts=tuple(
                PoolPart(first_head=heads.start, kv_heads=len(heads), name=each.name, nbytes=each.nbytes, ipc=each.ipc)
                for (heads, _), each in zip(self.parts, self._for_cell, strict=True)
            ),
        )

    def close(self) -> None:
        """Let go of all parts; idempotent."""
        while self.parts:
            self.parts.pop()[1].close()

    def _refuse(self) -> NoReturn:
        raise InvariantViolated("the pool of a group is not in one piece")
