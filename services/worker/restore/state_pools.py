"""The state pools that this worker has mapped, by the storage that owns them.

Steps save state into leased pages of them (HCache section 4.2.2), and restorations read them, so they are mapped
writable. On a GPU they are pinned, so that what is read goes over the link without staging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.kv.host_pools import Pins
from shared import logs
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry, PoolHandle

_log = logs.get_logger("worker")


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    view: HostPoolView
    is_pinned: bool


class StatePools:
    """Views of pools whose state pages restore KV of the worker's own geometry. Used by the compute thread."""

    def __init__(
        self,
        geometry: KvGeometry,
        pins: Pins | None = None,
        retire: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """``geometry`` is that of the worker's KV. ``retire`` runs what unmaps a pool behind whatever writes to it."""
        self._geometry = geometry
        self._pins = pins
        self._retire = retire
        self._pools: dict[str, _Mapped] = {}
        self._reasons: dict[str, str] = {}  # Why a pool that was to be mapped is not.

    def attach(self, storage_id: str, handle: PoolHandle) -> None:
        """Map a pool, replacing an older one of that storage. One that cannot be mapped is missed by ``view`` later."""
        self.detach(storage_id)
        try:
            if not handle.geometry.is_state or handle.geometry.as_kv != self._geometry:
                raise TransportError(
                    f"pool {handle.name} of {handle.geometry} holds no state that {self._geometry} is restored from"
                )
            view = HostPoolView.attach(handle)
        except TransportError as error:
            self._reasons[storage_id] = error.message
            _log.warning("state_pool_not_attached", storage=storage_id, reason=error.message)
            return
        self._pools[storage_id] = _Mapped(view, self._pin(storage_id, view))

    def detach(self, storage_id: str) -> None:
        """Unmap a pool; an unknown one is fine."""
        self._reasons.pop(storage_id, None)
        pool = self._pools.pop(storage_id, None)
        if pool is not None:
            self._retire(lambda: self._close(pool))

    def view(self, storage_id: str) -> HostPoolView:
        """A mapped pool. Raises TransportError, saying why, when there is none."""
        pool = self._pools.get(storage_id)
        if pool is None:
            raise TransportError(self._reasons.get(storage_id, f"no state pool of {storage_id} is attached"))
        return pool.view

    def is_pinned(self, storage_id: str) -> bool:
        """Whether a GPU may read that pool by itself."""
        pool = self._pools.get(storage_id)
        return pool is not None and pool.is_pinned

    def close(self) -> None:
        """Unmap all of them, here and now: nothing reads or writes them any more."""
        while self._pools:
            self._close(self._pools.popitem()[1])

    def _pin(self, storage_id: str, view: HostPoolView) -> bool:
        if self._pins is None:
            return False
        try:
            self._pins.pin(view.flat_pages())
        except TransportError as error:
            _log.warning("state_pool_not_pinned", storage=storage_id, reason=error.message)
            return False
        return True

    def _close(self, pool: _Mapped) -> None:
        if pool.is_pinned and self._pins is not None:
            self._pins.unpin(pool.view.flat_pages())
        pool.view.close()
