"""The host pools that this worker has mapped, by the storage that owns them."""

from __future__ import annotations

from shared import logs
from shared.errors import TransportError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry, PoolHandle

_log = logs.get_logger("worker")


class HostPools:
    """Read-only views of host pools with the worker's own geometry."""

    def __init__(self, geometry: KvGeometry) -> None:
        self._geometry = geometry
        self._views: dict[str, HostPoolView] = {}
        self._reasons: dict[str, str] = {}  # Why a pool that was to be mapped is not.

    def attach(self, storage_id: str, handle: PoolHandle) -> None:
        """Map a pool, replacing an older one of that storage. One that cannot be mapped fails its loads later."""
        self.detach(storage_id)
        try:
            if handle.geometry != self._geometry:
                raise TransportError(f"host pool {handle.name} has geometry {handle.geometry}, not {self._geometry}")
            self._views[storage_id] = HostPoolView.attach(handle, writable=False)
        except TransportError as error:
            self._reasons[storage_id] = error.message
            _log.warning("host_pool_not_attached", storage=storage_id, reason=error.message)

    def detach(self, storage_id: str) -> None:
        """Unmap a pool; an unknown one is fine."""
        self._reasons.pop(storage_id, None)
        view = self._views.pop(storage_id, None)
        if view is not None:
            view.close()

    def find(self, storage_id: str) -> HostPoolView:
        """The view of a pool. Raises TransportError, saying why, when there is none."""
        view = self._views.get(storage_id)
        if view is None:
            raise TransportError(self._reasons.get(storage_id, f"no host pool of {storage_id} is attached"))
        return view

    def close(self) -> None:
        for storage_id in list(self._views):
            self.detach(storage_id)
