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

# torch leaves these functions without types.
_cuda: Any = torch.cuda


def attach_part(handle: PoolHandle) -> DevicePool:
    """Map the part of another rank in rank 0, for writing.

    Closing it removes its name too, which a killed rank leaves behind. Raises TransportError.
    """
    check_device_handle(handle)
    if handle.kind == "shm":
        segment = SharedSegment.attach(handle.name, handle.nbytes, writable=True)
        return DevicePool(handle.geometry, handle.pages, torch.from_numpy(segment.array), segment)
    halves: Any = open_halves(handle, torch)
    return DevicePool(handle.geometry, handle.pages, halves.view(-1))


@dataclass(frozen=True, slots=True)
class PartOfPool:
    """A rank's part: the ``heads`` that it has of every layer, or None where it does not have the same heads of all.

    ``spans`` map its bytes to whole pages; ``read_spans`` are those of bytes that no part before it has.
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
    """The parts as one pool: page p is page p of every part.

    Its handle describes the parts, and its bytes cannot be seen as a whole: a rank attends over its own part, and
    movers move all parts (``parts_mover``).
    """

    def __init__(self, planes: PlaneMap, parts: Sequence[PartOfPool], for_cell: Sequence[PoolHandle]) -> None:
        """``planes`` is the map of whole pages; ``parts`` are in rank order, ``for_cell`` are their handles."""
        self.geometry = planes.geometry
        self.planes = planes
        self.parts = list(parts)
        self.pages = self.parts[0].pool.pages
        self.device = self.parts[0].pool.device
        self._for_cell = list(for_cell)

    @property
    def tensor(self) -> torch.Tensor:
        """Not available: raises InvariantViolated, because the pool is not in one piece."""
        self._refuse()

    def k(self, layer: int) -> torch.Tensor:
        """Raise InvariantViolated: the pool is not in one piece."""
        self._refuse()

    def v(self, layer: int) -> torch.Tensor:
        """Raise InvariantViolated: the pool is not in one piece."""
        self._refuse()

    def rows(self, layer: int, half: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the heads of all parts side by side, on the device of rank 0; see :meth:`DevicePool.rows`.

        The step must have ended: its last exchange comes after every rank's writes. For parts by heads.
        """
        width = self.geometry.head_dim
        whole = torch.empty(
            (len(slots), self.geometry.kv_heads * width), dtype=TORCH_DTYPES[self.geometry.dtype], device=self.device
        )
        for part in self.parts:
            if part.heads is None or not part.read_spans:
                continue  # With more ranks than KV heads, neighbours have the same head.
            columns = slice(part.heads.start * width, part.heads.stop * width)
            whole[:, columns] = part.pool.rows(layer, half, slots.to(part.pool.device))
        return whole

    def put_kv(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Give every part its heads, see :meth:`DevicePool.put_kv`; on return every rank may read them.

        For parts by heads. Raises InvariantViolated for others.
        """
        for part in self.parts:
            if part.heads is None:
                self._refuse()
            device = part.pool.device
            part.pool.put_kv(layer, slots.to(device), kv[:, part.heads.start : part.heads.stop].to(device))
        for part in self.parts:
            if part.pool.device.type == "cuda":  # Another process reads it, whose streams do not wait for ours.
                _cuda.synchronize(part.pool.device)

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        """Raise InvariantViolated: the pool is not in one piece."""
        self._refuse()

    def memory(self) -> PageMemory:
        """Raise InvariantViolated: the pool is not in one piece."""
        self._refuse()

    def handle(self) -> PoolHandle:
        """Return how another process maps this pool, part by part. Raises InvariantViolated once it is closed."""
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
        """Close all parts; idempotent."""
        while self.parts:
            self.parts.pop().pool.close()

    def _refuse(self) -> NoReturn:
        raise InvariantViolated("the pool of a group is not in one piece")


def _part_of(part: PartOfPool, handle: PoolHandle) -> PoolPart:
    """Return the description of a part for other processes, with the spans that they read from it."""
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
