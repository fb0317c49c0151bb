"""The device pool of a group: parts in every rank that together hold whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import TORCH_DTYPES, DevicePool
from services.worker.kv.page_memory import PageMemory
from services.worker.kv.planes import PlaneMap
from services.worker.parallel.division import Share
from services.worker.parallel.group_layout import GroupLayout
from shared.errors import InvariantViolated
from shared.memory.cuda_ipc import open_halves
from shared.memory.device_pool_view import check_device_handle
from shared.memory.segment import SharedSegment
from shared.messages.pools import PartSpan, PoolHandle, PoolPart


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


@dataclass(frozen=True, slots=True)
class PartOfPool:
    """A rank's part: the ``heads`` that it has of every layer, or None where it has something else of some. ``spans``
    say where its bytes belong in whole pages, ``read_spans`` those of what no part before it has.
    """

    pool: DevicePool
    heads: range | None
    spans: tuple[PartSpan, ...]
    read_spans: tuple[PartSpan, ...]

    @classmethod
    def of_rank(cls, rank: int, layout: GroupLayout, pool: DevicePool) -> PartOfPool:
        """Return the part of ``rank``, in ``pool``."""
        heads = Share(rank, layout.ranks).kv_heads(layout.kv_heads[0]) if layout.is_by_heads else None
        return cls(pool, heads, layout.spans(rank), layout.read_spans(rank))


class GroupPool(DevicePool):
    """Page p is page p of every part. It tells others how to map the parts, and has no bytes that could be seen as a
    whole: attention of a rank goes over that rank's part, and movers go over all of them (``parts_mover``).
    """

    def __init__(self, planes: PlaneMap, parts: Sequence[PartOfPool], for_cell: Sequence[PoolHandle]) -> None:
        """``planes`` is the map of whole pages; ``parts`` in the order of the ranks, ``for_cell`` are their handles."""
        self.geometry = planes.geometry
        self.planes = planes
        self.parts = list(parts)
        self.pages = self.parts[0].pool.pages
        self.device = self.parts[0].pool.device
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
        ended, with its last exchange behind what every rank has written. For parts by heads.
        """
        width = self.geometry.head_dim
        whole = torch.empty(
            (len(slots), self.geometry.kv_heads * width), dtype=TORCH_DTYPES[self.geometry.dtype], device=self.device
        )
        for part in self.parts:
            if part.heads is None or not part.read_spans:
                continue  # With more ranks than KV heads, neighbours have the same.
            columns = slice(part.heads.start * width, part.heads.stop * width)
            whole[:, columns] = part.pool.rows(layer, half, slots.to(part.pool.device))
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
            parts=tuple(_part_of(part, each) for part, each in zip(self.parts, self._for_cell, strict=True)),
        )

    def close(self) -> None:
        """Let go of all parts; idempotent."""
        while self.parts:
            self.parts.pop().pool.close()

    def _refuse(self) -> NoReturn:
        raise InvariantViolated("the pool of a group is not in one piece")


def _part_of(part: PartOfPool, handle: PoolHandle) -> PoolPart:
    """Return what others are told of a part; of parts by spans what is read from it."""
    first, count = (0, 0) if part.heads is None else (part.heads.start, len(part.heads))
    geometry, spans = (handle.geometry, part.read_spans) if part.heads is None else (None, ())
    return PoolPart(
        first_head=first,
        kv_heads=count,
        name=handle.name,
        nbytes=handle.nbytes,
        ipc=handle.ipc,
        geometry=geometry,
        spans=spans,
    )
