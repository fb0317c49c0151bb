"""The pools that this storage uses: its own host pool and hidden pool, and the device pools of this node's workers.

A device pool is never unmapped under a running copy: the copy holds the mapping, which is released with its last holder
(see ``shared.memory.segment``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.storage import measures
from services.storage.copy_share import CopyShare, SharedDevicePages
from services.storage.core.backup_check import Transfer, check_backup
from services.storage.core.fetch_check import FetchChunk, check_fetch
from services.storage.core.save_check import SaveChunk, check_save, reads_device
from shared.compact_messages import whole_save
from shared.errors import ConfigError, DeviceFailed, InvalidRequest, ThermoclineError
from shared.memory import DevicePartsView, DevicePoolView, HostPoolView, pages_for
from shared.memory.device_pool_view import DevicePages, GatheredPages
from shared.messages.pools import HIDDEN, ChunkForm, KvGeometry, PoolHandle
from shared.messages.storage_plans import AttachDevicePool, BackupPages, FetchChunks, SaveChunks, SaveOrder

HOST_FLAG, HIDDEN_FLAG = "--host-kv-bytes", "--hidden-bytes"
MAPPING = "it is being mapped"


def open_device_pool(handle: PoolHandle) -> DevicePages:
    """Map a worker's device pool, in host or CUDA memory. Raises TransportError, or ConfigError without torch."""
    if handle.parts:
        return DevicePartsView.attach(handle, _open_whole)
    return _open_whole(handle)


def _open_whole(handle: PoolHandle) -> GatheredPages:
    if handle.kind == "shm":
        return DevicePoolView.attach(handle)
    # Only a storage beside a GPU pays for importing torch.
    from services.storage.gpu_bridge import CudaDevicePool

    return CudaDevicePool.attach(handle)


def pin_pool(pool: HostPoolView) -> None:
    """Register a pool with the CUDA driver, on a thread of its own: it may take minutes."""
    from services.storage.gpu_bridge import start_pinning

    start_pinning(pool.flat_pages())


def unpin_pool(pool: HostPoolView) -> None:
    """Undo :func:`pin_pool`, before the pool is unmapped."""
    from services.storage.gpu_bridge import unpin

    unpin(pool.flat_pages())


def _is_on_gpu(pages: DevicePages | None) -> bool:
    return pages is not None and pages.handle.kind == "cuda_ipc"


@dataclass(slots=True)
class _DevicePool:
    incarnation: str
    handle: PoolHandle
    pages: DevicePages | None
    error: str = ""  # Why it could not be mapped; "" if it was.


class Pools:
    """Creates, maps and finds pools; all calls come from one task, copies from I/O threads."""

    def __init__(
        self,
        shm_prefix: str,
        host_bytes: int,
        hidden_bytes: int = 0,
        *,
        backup_share: float = 1.0,
        open_device: Callable[[PoolHandle], DevicePages] = open_device_pool,
        pin: Callable[[HostPoolView], None] = pin_pool,
        unpin: Callable[[HostPoolView], None] = unpin_pool,
    ) -> None:
        """Prepare; ``backup_share`` is the part of the time in which devices may be copied from.

        ``pin`` and ``unpin`` make a pool reachable for GPUs, and undo that; pinning goes on in the background.
        """
        self._pin, self._unpin = pin, unpin
        self._pins: set[str] = set()  # Names of pools whose pinning was begun.
        self._shm_prefix = shm_prefix
        self._host_bytes = host_bytes
        self._hidden_bytes = hidden_bytes
        self._open_device = open_device
        self._share = CopyShare(backup_share) if backup_share < 1 else None
        self._host: HostPoolView | None = None
        self._hidden: HostPoolView | None = None
        self._devices: dict[str, _DevicePool] = {}
        self._refused: dict[str, str] = {}  # Why pools of this storage could not be made, by their flag.

    @property
    def share(self) -> CopyShare | None:
        """The bound on the time in which devices are copied from; None is no bound."""
        return self._share

    @property
    def host(self) -> HostPoolView:
        """The host pool. Raises InvalidRequest while there is none."""
        if self._host is None:
            raise InvalidRequest("there is no host pool yet")
        return self._host

    @property
    def hidden(self) -> HostPoolView:
        """The pool of hidden pages. Raises InvalidRequest while there is none."""
        if self._hidden is None:
            raise InvalidRequest("there is no hidden pool yet")
        return self._hidden

    def pool(self, form: ChunkForm) -> HostPoolView:
        """Return the pool that chunks of this form are saved from and fetched to. Raises InvalidRequest without one."""
        return self.hidden if form == HIDDEN else self.host

    @property
    def host_pages(self) -> int:
        """Pages of the host pool; 0 while there is none."""
        return 0 if self._host is None else self._host.handle.pages

    @property
    def hidden_pages(self) -> int:
        """Pages of the hidden pool; 0 while there is none."""
        return 0 if self._hidden is None else self._hidden.handle.pages

    def create_host(self, geometry: KvGeometry) -> PoolHandle:
        """Create the host pool, as large as the budget allows; return the existing one if it fits the order.

        Blocking: it touches every page. Raises ConfigError when there is no room, or a pool of another geometry.
        """
        if self._host is None:
            self._host = self._create(geometry, self._host_bytes, HOST_FLAG)
            measures.POOL_BYTES.set(self._host.handle.nbytes)
            self._pin_own()
        elif self._host.geometry != geometry:
            raise ConfigError(f"the host pool has geometry {self._host.geometry}, not {geometry}")
        return self._host.handle

    def create_hidden(self, geometry: KvGeometry) -> PoolHandle:
        """Create the hidden pool, as large as its budget allows; return the existing one if it fits the order.

        Blocking, like :meth:`create_host`. Raises ConfigError when there is no room, a pool of another geometry, or a
        host pool of other KV than would be restored; InvalidRequest while there is no host pool.
        """
        if self.host.geometry != geometry.as_kv:
            raise ConfigError(f"the host pool has geometry {self.host.geometry}, which is not restored from {geometry}")
        if not self._hidden_bytes:
            raise ConfigError("this storage keeps no hidden states: --hidden-bytes is 0")
        if self._hidden is None:
            self._hidden = self._create(geometry, self._hidden_bytes, HIDDEN_FLAG)
            measures.HIDDEN_POOL_BYTES.set(self._hidden.handle.nbytes)
            self._pin_own()
        elif self._hidden.geometry != geometry:
            raise ConfigError(f"the hidden pool has geometry {self._hidden.geometry}, not {geometry}")
        return self._hidden.handle

    def _create(self, geometry: KvGeometry, budget: int, flag: str) -> HostPoolView:
        pages = pages_for(geometry, budget)
        try:
            if not pages:
                raise ConfigError(
                    f"the budget of {budget} bytes holds no page of {geometry.page_bytes} bytes: raise {flag}"
                )
            made = HostPoolView.create(self._shm_prefix, geometry, pages)
        except (ThermoclineError, OSError) as error:
            self._refused[flag] = str(error)
            raise
        self._refused.pop(flag, None)
        return made

    def _pin_own(self) -> None:
        """Pin this storage's pools, once each, where a GPU writes into them by itself."""
        if not any(_is_on_gpu(device.pages) for device in list(self._devices.values())):
            return
        for own in (self._host, self._hidden):
            if own is not None and own.handle.name not in self._pins:
                self._pins.add(own.handle.name)
                self._pin(own)

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield (pool, reason, flag) for each pool that was asked for and is not there."""
        for flag, reason in list(self._refused.items()):
            yield "hidden pool" if flag == HIDDEN_FLAG else "host pool", reason, flag
        for worker_id, pool in list(self._devices.items()):
            if pool.pages is None and pool.error != MAPPING:
                yield f"device pool of {worker_id}", f"it cannot be mapped: {pool.error}", ""
            elif pool.pages is not None and pool.pages.fault:
                yield f"device pool of {worker_id}", f"{pool.pages.fault}: restart this storage", ""

    def attach(self, order: AttachDevicePool) -> None:
        """Map a device pool, replacing an older one of that worker. Blocking.

        The reason why one cannot be mapped is remembered, so that backups of it say why they fail; the error is raised
        as well.
        """
        self._devices[order.worker_id] = _DevicePool(order.worker_incarnation, order.handle, None, MAPPING)
        try:
            pages = self._open_device(order.handle)
        except ThermoclineError as error:
            self._devices[order.worker_id] = _DevicePool(order.worker_incarnation, order.handle, None, error.message)
            raise
        shared = pages if self._share is None else SharedDevicePages(pages, self._share)
        self._devices[order.worker_id] = _DevicePool(order.worker_incarnation, order.handle, shared)
        self._pin_own()

    def detach(self, worker_id: str, incarnation: str) -> bool:
        """Release a device pool; return False if it is not (or no longer) that incarnation's."""
        found = self._devices.get(worker_id)
        if found is None or found.incarnation != incarnation:
            return False
        del self._devices[worker_id]
        return True

    def device(self, worker_id: str, incarnation: str) -> DevicePages:
        """Return a mapped device pool.

        Raises InvalidRequest, with the reason, when there is none, and DeviceFailed when this process cannot use its
        GPU any more.
        """
        found = self._devices.get(worker_id)
        if found is None or found.incarnation != incarnation:
            raise InvalidRequest(f"no device pool of worker {worker_id} ({incarnation}) is attached")
        if found.pages is None:
            raise InvalidRequest(f"the device pool of worker {worker_id} could not be mapped: {found.error}")
        if found.pages.fault:
            raise DeviceFailed(f"the device pool of worker {worker_id} is lost: {found.pages.fault}")
        return found.pages

    def device_handle(self, worker_id: str, incarnation: str) -> PoolHandle:
        """Return an attached device pool's handle, for backups whose bytes the worker may copy.

        One on a GPU need not be mapped. Raises like :meth:`device`.
        """
        found = self._devices.get(worker_id)
        if found is not None and found.incarnation == incarnation and found.handle.kind == "cuda_ipc":
            return found.handle
        return self.device(worker_id, incarnation).handle

    def check(self, order: BackupPages) -> Transfer:
        """Return the transfer that ``order`` asks for. Raises InvalidRequest when it cannot be carried out."""
        device = self.device_handle(order.worker_id, order.worker_incarnation)
        return check_backup(order, device, self.host.handle)

    def whole_save(self, order: SaveOrder) -> SaveChunks:
        """Return the order in its complete form. Raises CodecError, or InvalidRequest without a pool."""
        return whole_save(order, self.pool(order.form).handle.geometry.page_size)

    def check_save(self, order: SaveChunks) -> list[SaveChunk]:
        """Return the chunks that ``order`` names. Raises InvalidRequest when they cannot be read."""
        host = self.pool(order.form).handle
        reads = reads_device(order) and not host.geometry.is_hidden
        device = self.device(order.worker_id, order.worker_incarnation).handle if reads else None
        return check_save(order, host, device)

    def check_fetch(self, order: FetchChunks) -> list[FetchChunk]:
        """Return the chunks that ``order`` asks for. Raises InvalidRequest when they cannot be brought."""
        return check_fetch(order, self.pool(order.form).handle)

    def close(self) -> None:
        """Release every pool and remove the names of its own. Workers that map them keep their mapping."""
        self._devices.clear()
        for own in (self._host, self._hidden):
            if own is not None:
                if own.handle.name in self._pins:
                    self._unpin(own)
                own.unlink()
                own.close()
        self._host = self._hidden = None
