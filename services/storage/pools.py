"""The pools that this storage has: its own host pool, and the device pools of this node's workers.

Nothing here unmaps a device pool under a running copy: the copy holds the mapping, and it goes with the last
holder (see ``shared.memory.segment``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.storage import measures
from services.storage.core.backup_check import Transfer, check_backup
from services.storage.core.fetch_check import FetchChunk, check_fetch
from services.storage.core.save_check import SaveChunk, check_save, reads_device
from shared.errors import ConfigError, InvalidRequest, ThermoclineError
from shared.memory import DevicePoolView, HostPoolView, pages_for
from shared.memory.device_pool_view import DevicePages
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_plans import AttachDevicePool, BackupPages, FetchChunks, SaveChunks


def open_device_pool(handle: PoolHandle) -> DevicePages:
    """Map a worker's device pool, whichever memory it is in. Raises TransportError, or ConfigError without torch."""
    if handle.kind == "shm":
        return DevicePoolView.attach(handle)
    # Only a storage beside a GPU pays for importing torch.
    from services.storage.gpu_bridge import CudaDevicePool

    return CudaDevicePool.attach(handle)


@dataclass(slots=True)
class _DevicePool:
    incarnation: str
    pages: DevicePages | None
    error: str = ""  # Why it could not be mapped.


class Pools:
    """Creating, mapping and finding; all calls come from one task, copies from I/O threads."""

    def __init__(
        self, shm_prefix: str, host_bytes: int, *, open_device: Callable[[PoolHandle], DevicePages] = open_device_pool
    ) -> None:
        self._shm_prefix = shm_prefix
        self._host_bytes = host_bytes
        self._open_device = open_device
        self._host: HostPoolView | None = None
        self._devices: dict[str, _DevicePool] = {}

    @property
    def host(self) -> HostPoolView:
        """The host pool. Raises InvalidRequest while there is none."""
        if self._host is None:
            raise InvalidRequest("there is no host pool yet")
        return self._host

    @property
    def host_pages(self) -> int:
        return 0 if self._host is None else self._host.handle.pages

    def create_host(self, geometry: KvGeometry) -> PoolHandle:
        """Make the host pool, as large as the budget allows; the one that is there already if it fits the order.

        Blocking: it touches every page. Raises ConfigError when there is no room, or a pool of another geometry.
        """
        if self._host is None:
            pages = pages_for(geometry, self._host_bytes)
            if not pages:
                raise ConfigError(
                    f"the budget of {self._host_bytes} bytes holds no page of {geometry.page_bytes} bytes: "
                    "raise --host-kv-bytes"
                )
            self._host = HostPoolView.create(self._shm_prefix, geometry, pages)
            measures.POOL_BYTES.set(self._host.handle.nbytes)
        elif self._host.geometry != geometry:
            raise ConfigError(f"the host pool has geometry {self._host.geometry}, not {geometry}")
        return self._host.handle

    def attach(self, order: AttachDevicePool) -> None:
        """Map a device pool, replacing an older one of that worker. Blocking.

        One that cannot be mapped is remembered with the reason, so that backups of it say why they fail; the
        error is raised as well.
        """
        self._devices[order.worker_id] = _DevicePool(order.worker_incarnation, None, "it is being mapped")
        try:
            pages = self._open_device(order.handle)
        except ThermoclineError as error:
            self._devices[order.worker_id] = _DevicePool(order.worker_incarnation, None, error.message)
            raise
        self._devices[order.worker_id] = _DevicePool(order.worker_incarnation, pages)

    def detach(self, worker_id: str, incarnation: str) -> bool:
        """Let go of a device pool; False if it is not (or no more) that incarnation's."""
        found = self._devices.get(worker_id)
        if found is None or found.incarnation != incarnation:
            return False
        del self._devices[worker_id]
        return True

    def device(self, worker_id: str, incarnation: str) -> DevicePages:
        """A mapped device pool. Raises InvalidRequest, saying why, when there is none."""
        found = self._devices.get(worker_id)
        if found is None or found.incarnation != incarnation:
            raise InvalidRequest(f"no device pool of worker {worker_id} ({incarnation}) is attached")
        if found.pages is None:
            raise InvalidRequest(f"the device pool of worker {worker_id} could not be mapped: {found.error}")
        return found.pages

    def check(self, order: BackupPages) -> Transfer:
        """The transfer that ``order`` asks for. Raises InvalidRequest when it cannot be carried out."""
        device = self.device(order.worker_id, order.worker_incarnation)
        return check_backup(order, device.handle, self.host.handle)

    def check_save(self, order: SaveChunks) -> list[SaveChunk]:
        """The chunks that ``order`` names. Raises InvalidRequest when they cannot be read."""
        host = self.host.handle
        device = self.device(order.worker_id, order.worker_incarnation).handle if reads_device(order) else None
        return check_save(order, host, device)

    def check_fetch(self, order: FetchChunks) -> list[FetchChunk]:
        """The chunks that ``order`` asks for. Raises InvalidRequest when they cannot be brought."""
        return check_fetch(order, self.host.handle)

    def close(self) -> None:
        """Let go of every pool and remove the host pool's name. Workers that map it keep their mapping."""
        self._devices.clear()
        if self._host is not None:
            self._host.unlink()
            self._host.close()
            self._host = None
