"""The host pools that this worker has mapped, by the storage that owns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.kv.page_memory import PageLayout, PageMemory
from shared import logs
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry, PoolHandle

_log = logs.get_logger("worker")


class Pins(Protocol):
    """Makes mapped memory reachable for a GPU; see :mod:`services.worker.kv.pinning`."""

    def pin(self, array: npt.NDArray[np.uint8]) -> None:
        """Register the memory under ``array``. Raises TransportError when the driver refuses."""

    def unpin(self, array: npt.NDArray[np.uint8]) -> None:
        """The reverse, when nothing reads or writes it any more."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedPool:
    """A mapped host pool. ``is_pinned``: a GPU may read it by itself."""

    view: HostPoolView
    is_pinned: bool = False

    def memory(self) -> PageMemory:
        """Its pages, for a mover. Raises TransportError when the pool has been unmapped meanwhile."""
        layout = PageLayout.page_first(self.view.geometry, self.view.handle.pages)
        return PageMemory(layout, array=self.view.flat_pages(), is_pinned=self.is_pinned)


class HostPools:
    """Views of host pools with the worker's own geometry; nothing is ever written to them."""

    def __init__(
        self,
        geometry: KvGeometry,
        pins: Pins | None = None,
        retire: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """``retire`` runs what unpins a detached pool behind whatever still reads it."""
        self._geometry = geometry
        self._pins = pins
        self._retire = retire
        self._pools: dict[str, AttachedPool] = {}
        self._reasons: dict[str, str] = {}  # Why a pool that was to be mapped is not.

    def attach(self, storage_id: str, handle: PoolHandle) -> None:
        """Map a pool, replacing an older one of that storage. One that cannot be mapped fails its loads later."""
        self.detach(storage_id)
        try:
            if handle.geometry != self._geometry:
                raise TransportError(f"host pool {handle.name} has geometry {handle.geometry}, not {self._geometry}")
            # The driver registers only memory that this process may write.
            view = HostPoolView.attach(handle, writable=self._pins is not None)
        except TransportError as error:
            self._reasons[storage_id] = error.message
            _log.warning("host_pool_not_attached", storage=storage_id, reason=error.message)
            return
        self._pools[storage_id] = AttachedPool(view, self._pin(storage_id, view))

    def detach(self, storage_id: str) -> None:
        """Unmap a pool; an unknown one is fine."""
        self._reasons.pop(storage_id, None)
        pool = self._pools.pop(storage_id, None)
        if pool is not None and pool.is_pinned:
            self._retire(lambda: self._close(pool))
        elif pool is not None:
            self._close(pool)

    def find(self, storage_id: str) -> AttachedPool:
        """A mapped pool. Raises TransportError, saying why, when there is none."""
        pool = self._pools.get(storage_id)
        if pool is None:
            raise TransportError(self._reasons.get(storage_id, f"no host pool of {storage_id} is attached"))
        return pool

    def close(self) -> None:
        """Unmap all of them, here and now: nothing reads them any more."""
        while self._pools:
            self._close(self._pools.popitem()[1])

    def _pin(self, storage_id: str, view: HostPoolView) -> bool:
        if self._pins is None:
            return False
        try:
            self._pins.pin(view.flat_pages())
        except TransportError as error:
            _log.warning("host_pool_not_pinned", storage=storage_id, reason=error.message)
            return False
        return True

    def _close(self, pool: AttachedPool) -> None:
        if pool.is_pinned and self._pins is not None:
            self._pins.unpin(pool.view.flat_pages())
        pool.view.close()
