"""Device pools of other workers of this node, mapped read-only, by the worker that owns them.

A neighbour's pages move device to device, layer-first on both sides. They have no checksums: the scheduler keeps them
locked until the batch that reads them is answered, and the incarnation tells whether the pool is the one it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.neighbour_parts import PartsMemory
from services.worker.kv.page_memory import PageLayout, PageMemory, PageNumbers
from shared import logs
from shared.errors import TransportError
from shared.memory import DevicePoolView
from shared.memory.cuda_ipc import open_halves
from shared.memory.device_pool_view import check_device_handle
from shared.messages.pools import KvGeometry, PoolHandle

_log = logs.get_logger("worker")


@dataclass(frozen=True, slots=True, eq=False)
class Neighbour:
    """A mapped pool of one incarnation of a worker.

    ``views`` hold the mapping, in shared memory. ``memory`` is its pages, or ``parts`` where the worker is a group.
    """

    incarnation: str
    pages: int
    memory: PageMemory | None = None
    parts: PartsMemory | None = None
    views: tuple[DevicePoolView, ...] = ()

    def load(self, mover: PageMover, layer: int, pages: PageNumbers, device_pages: PageNumbers) -> None:
        """Copy one layer of these pages by ``mover``, or launch the copy."""
        layers = range(layer, layer + 1)
        if self.memory is not None:
            mover.load(self.memory, layers, pages, device_pages)
            return
        assert self.parts is not None
        staged = self.parts.staged(layer, pages)
        mover.load(staged, layers, np.arange(len(pages), dtype=np.int32), device_pages)
        mover.drain()  # The staged rows are freed after this.


class Neighbours:
    """The mapped device pools by worker id. Used by the compute thread."""

    def __init__(self, geometry: KvGeometry, device_type: str) -> None:
        """``device_type`` is that of this worker's own pool: ``cpu`` or ``cuda``."""
        self._geometry = geometry
        self._kind = "shm" if device_type == "cpu" else "cuda_ipc"
        self._mapped: dict[str, Neighbour] = {}
        self._reasons: dict[str, str] = {}  # Why a pool could not be mapped, by worker id.

    def attach(self, worker_id: str, incarnation: str, handle: PoolHandle) -> None:
        """Map a pool, replacing that of an older incarnation. If it cannot be mapped, its loads fail later."""
        self._forget(worker_id)
        try:
            self._mapped[worker_id] = self._map(incarnation, handle)
        except TransportError as error:
            self._reasons[worker_id] = error.message
            _log.warning("neighbour_not_attached", neighbour=worker_id, reason=error.message)

    def detach(self, worker_id: str, incarnation: str) -> None:
        """Unmap a pool; one of another incarnation, or an unknown one, is left alone."""
        mapped = self._mapped.get(worker_id)
        if mapped is None or mapped.incarnation == incarnation:
            self._forget(worker_id)

    def find(self, worker_id: str, incarnation: str) -> Neighbour:
        """Return the pool of just this incarnation. Raises TransportError, with the reason, when it is not mapped."""
        mapped = self._mapped.get(worker_id)
        if mapped is None:
            raise TransportError(self._reasons.get(worker_id, f"no device pool of {worker_id} is attached"))
        if mapped.incarnation != incarnation:
            raise TransportError(f"the device pool of {worker_id} is of incarnation {mapped.incarnation}")
        return mapped

    def close(self) -> None:
        """Unmap all pools."""
        for worker_id in list(self._mapped):
            self._forget(worker_id)

    def _map(self, incarnation: str, handle: PoolHandle) -> Neighbour:
        if handle.geometry != self._geometry:
            raise TransportError(f"a neighbour's pool has geometry {handle.geometry}, not {self._geometry}")
        if handle.kind != self._kind:
            raise TransportError(f"a neighbour's pool is {handle.kind} memory, and this worker's is {self._kind}")
        check_device_handle(handle)
        views: list[DevicePoolView] = []
        try:
            if not handle.parts:
                return Neighbour(incarnation, handle.pages, _opened(handle, views), views=tuple(views))
            parts = PartsMemory(
                handle.geometry, [(spans, _opened(part, views)) for spans, part in handle.part_handles()]
            )
        except TransportError:
            for view in views:
                view.close()
            raise
        return Neighbour(incarnation, handle.pages, parts=parts, views=tuple(views))

    def _forget(self, worker_id: str) -> None:
        self._reasons.pop(worker_id, None)
        mapped = self._mapped.pop(worker_id, None)
        for view in () if mapped is None else mapped.views:
            # A copy that runs keeps the mapping through its own array.
            view.close()


def _opened(handle: PoolHandle, views: list[DevicePoolView]) -> PageMemory:
    """Map a pool in one piece; holders of the mapping in shared memory are appended to ``views``.

    Raises TransportError.
    """
    layout = PageLayout.layer_first(handle.geometry, handle.pages)
    if handle.kind == "shm":
        views.append(DevicePoolView.attach(handle))
        return PageMemory(layout, array=views[-1].halves.reshape(-1))
    halves: Any = open_halves(handle, torch)
    return PageMemory(layout, tensor=halves.view(-1))
