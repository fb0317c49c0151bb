"""A model storage: makes its host pool, copies device pages into it, and keeps chunks on a model disk."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from shared import codec
from shared.chunks import chunk_pages
from shared.compact_messages import whole_save
from shared.messages import storage_events, storage_plans
from shared.messages.base import unpack_int32
from shared.messages.pools import HIDDEN, KvGeometry, PoolHandle
from tests.stateful.model_disk import ModelDisk, ModelFetch
from tests.stateful.model_pages import HostPool, Page, WrongKv
from tests.stateful.model_saves import check_save

if TYPE_CHECKING:
    from tests.stateful.cell_model import CellModel
    from tests.stateful.model_worker import ModelWorker


class ModelStorage:
    """Carries out plans in order; fetches go on beside them, a chunk at a time."""

    def __init__(self, cell: CellModel, storage_id: str, incarnation: str, node: str, pages: int) -> None:
        self.cell = cell
        self.storage_id, self.incarnation, self.node, self.pages = storage_id, incarnation, node, pages
        self.pool: HostPool | None = None
        self.hidden_pages = 0
        self.hidden_pool: HostPool | None = None
        self.devices: dict[tuple[str, str], ModelWorker] = {}
        self.inbox: deque[storage_plans.StoragePlan] = deque()
        self.outbox: deque[codec.Input] = deque()
        self.last_plan = 0
        self.has_remote = self.keeps_sparse = False
        self.chunk_seconds = 1e-5  # What it says that reading a chunk takes.
        self.fetches: dict[int, ModelFetch] = {}
        self.is_draining = self.has_left = False
        self.pinned: dict[bytes, None] = {}

    @property
    def disk(self) -> ModelDisk:
        return self.cell.disks[self.storage_id]

    @property
    def hidden_disk(self) -> ModelDisk:
        """What of the disk holds hidden states."""
        return self.cell.hidden_disks[self.storage_id]

    @property
    def sparse_disk(self) -> dict[bytes, None]:
        """Chunks of KV that the disk holds a second time, so that they can be read in part."""
        return self.cell.sparse_disks[self.storage_id]

    def receive(self, plan: storage_plans.StoragePlan) -> None:
        assert plan.number == self.last_plan + len(self.inbox) + 1, "a plan is missing"
        self.inbox.append(plan)

    def step(self, *, backups_succeed: bool = True, saves_succeed: bool = True) -> bool:
        """Execute the next plan; returns whether there was one."""
        if not self.inbox or self.has_left:
            return False
        plan = self.inbox.popleft()
        self.last_plan = plan.number
        match plan.order:
            case storage_plans.CreateHostPool():
                self._create(plan.order.geometry)
            case storage_plans.AttachDevicePool():
                key = (plan.order.worker_id, plan.order.worker_incarnation)
                worker = self.cell.known_workers[key]
                self.devices[key] = worker
            case storage_plans.DetachDevicePool():
                self.devices.pop((plan.order.worker_id, plan.order.worker_incarnation), None)
            case storage_plans.BackupPages():
                self._backup(plan.order, backups_succeed)
            case storage_plans.SaveChunks() | storage_plans.SaveTokens():
                self._save(plan.order, saves_succeed)
            case storage_plans.FetchChunks():
                pool = self.hidden_pool if plan.order.form == HIDDEN else self.pool
                assert pool is not None
                self.fetches[plan.order.fetch_id] = ModelFetch(plan.order, pool, self._pages_each)
            case storage_plans.CancelFetch():
                fetch = self.fetches.get(plan.order.fetch_id)
                if fetch is not None:
                    fetch.is_cancelled = True
            case storage_plans.DropChunks():
                self._drop(plan.order)
            case storage_plans.PinChunks():
                for start in range(0, len(plan.order.chunks), 16):
                    self.pinned[plan.order.chunks[start : start + 16]] = None
            case storage_plans.ReleaseStorage():
                assert self.is_draining
                self._say(storage_events.StorageLeft)
                self.has_left = True
            case _:
                raise AssertionError(f"unknown order {plan.order}")
        return True

    def drain(self, grace_ms: int = 1_000) -> None:
        """Say that this storage was asked to end."""
        self.is_draining = True
        self._say(storage_events.StorageDraining, grace_ms=grace_ms)

    @property
    def _pages_each(self) -> int:
        return chunk_pages(self.cell.page_size)

    def fetch(self, *, index: int = 0, chunks: int = 1, error: str = "") -> bool:
        """Go on with one of the fetches under way, or let it fail; returns whether there was one."""
        if not self.fetches or self.has_left:
            return False
        fetch_id = list(self.fetches)[index % len(self.fetches)]
        fetch = self.fetches[fetch_id]
        goes_on = not error
        while goes_on and chunks:
            goes_on, chunks = self._bring(fetch), chunks - 1
        if not goes_on:
            del self.fetches[fetch_id]
        self._say(
            storage_events.ChunksFetched,
            fetch_id=fetch_id,
            chunks=fetch.done,
            is_over=not goes_on,
            disk_chunks=fetch.disk_chunks,
            remote_chunks=fetch.remote_chunks,
            lent_chunks=fetch.lent_chunks,
            missing=b"".join(fetch.missing),
            error=error,
            nbytes=fetch.done * 512,
            seconds=fetch.done * self.chunk_seconds,
        )
        return True

    def _bring(self, fetch: ModelFetch) -> bool:
        if fetch.order.form == HIDDEN:
            return fetch.step(self.hidden_disk, self.cell.hidden_remote if self.has_remote else ModelDisk(room=0))
        lender = fetch.order.lender
        if lender is not None:
            other = self.cell.storages.get(lender.storage_id)
            is_there = other is not None and other.incarnation == lender.incarnation
            return fetch.borrow(other.pool if other is not None and is_there else None)
        return fetch.step(self.disk, self.cell.remote)

    def _save(self, told: storage_plans.SaveOrder, succeeds: bool) -> None:
        is_compact, order = isinstance(told, storage_plans.SaveTokens), whole_save(told, self.cell.page_size)
        is_hidden = order.form == HIDDEN
        pool, disk = (self.hidden_pool, self.hidden_disk) if is_hidden else (self.pool, self.disk)
        assert pool is not None
        check_save(order, self.cell.page_size, self.cell.submitted.values())
        worker = self.devices.get((order.worker_id, order.worker_incarnation))
        device_pages = unpack_int32(order.device_pages)
        pages: list[Page | None] = []
        for index, number in enumerate(unpack_int32(order.host_pages)):
            identity = order.identities[index * 16 : (index + 1) * 16]
            if number >= 0:
                page = pool.memory.get(number)
            else:
                page = worker.memory.get(device_pages[index]) if worker is not None else None
                if worker is not None and (page is None or page.identity() != identity):
                    raise WrongKv(f"{order.worker_id} page {device_pages[index]} was reused under a save")
            is_good = page is not None and not page.is_corrupt and page.identity() == identity
            if number >= 0 and not is_good and not (page is not None and page.is_corrupt):
                raise WrongKv(f"host page {number} does not hold what is to be saved")
            pages.append(page if is_good else None)
        saved, dropped = [], []
        each = self._pages_each
        for start in range(0, len(pages), each):
            chunk = [page for page in pages[start : start + each] if page is not None]
            if succeeds and len(chunk) == each:
                name = chunk[-1].identity()
                saved.append(name)
                dropped += disk.put(name, chunk) if disk.room else []
                if self.has_remote:
                    (self.cell.hidden_remote if is_hidden else self.cell.remote).put(name, chunk)
        kept = [name for name in saved if name in disk.chunks]
        is_all = is_compact and len(kept) * each == len(pages)
        self._say(
            storage_events.ChunksSaved,
            save_id=order.save_id,
            chunks=b"" if is_all else b"".join(kept),
            dropped=b"".join(dropped),
            error="" if succeeds else "made to fail",
            is_all=is_all,
        )

    def _drop(self, order: storage_plans.DropChunks) -> None:
        """Whatever the namespace: a model chunk does not say whose it is, and to drop more is harmless."""
        if "remote" in order.tiers:
            self.cell.remote.chunks.clear()
            self.cell.hidden_remote.chunks.clear()
        if "disk" in order.tiers:
            names = b"".join(self.disk.chunks)
            self.disk.chunks.clear()
            self._say(storage_events.ChunksDropped, chunks=names)
            names = b"".join(self.hidden_disk.chunks)
            self.hidden_disk.chunks.clear()
            if names:
                self._say(storage_events.ChunksDropped, chunks=names, form=HIDDEN)

    def _say(self, kind: type, **fields: object) -> None:
        self.outbox.append(kind(storage_id=self.storage_id, incarnation=self.incarnation, **fields))

    def _create(self, wanted: KvGeometry) -> None:
        if wanted.is_hidden:
            self._create_hidden_pool(wanted)
            return
        self.pool = HostPool(self.storage_id, self.incarnation, self.pages)
        self.cell.host_pools[self.incarnation] = self.pool
        handle = PoolHandle(
            kind="shm", layout="page_first", name=self.incarnation, nbytes=0, pages=self.pages, geometry=wanted
        )
        self.outbox.append(
            storage_events.HostPoolCreated(storage_id=self.storage_id, incarnation=self.incarnation, handle=handle)
        )
        if self.disk.chunks:
            self._say(storage_events.ChunksListed, chunks=b"".join(self.disk.chunks))
        if self.sparse_disk:
            self._say(storage_events.ChunksListed, chunks=b"".join(self.sparse_disk), form="sparse")

    def _create_hidden_pool(self, wanted: KvGeometry) -> None:
        assert self.pool is not None, "a hidden pool is made before the host pool"
        name = f"{self.incarnation}.hidden"
        self.hidden_pool = HostPool(self.storage_id, self.incarnation, self.hidden_pages)
        self.cell.host_pools[name] = self.hidden_pool
        handle = PoolHandle(
            kind="shm", layout="page_first", name=name, nbytes=0, pages=self.hidden_pages, geometry=wanted
        )
        self._say(storage_events.HostPoolCreated, handle=handle, form=HIDDEN)
        if self.hidden_disk.chunks:
            self._say(storage_events.ChunksListed, chunks=b"".join(self.hidden_disk.chunks), form=HIDDEN)

    def _backup(self, order: storage_plans.BackupPages, succeeds: bool) -> None:
        assert self.pool is not None
        device = self.devices.get((order.worker_id, order.worker_incarnation))
        is_ok = succeeds and device is not None
        pairs = zip(unpack_int32(order.device_pages), unpack_int32(order.host_pages), strict=True)
        for index, (device_page, host_page) in enumerate(pairs):
            identity = order.identities[index * 16 : (index + 1) * 16]
            if device is not None:
                page = device.memory.get(device_page)
                if page is None or page.identity() != identity:
                    raise WrongKv(f"{order.worker_id} page {device_page} was reused under a backup")
            if is_ok and device is not None:
                page = device.memory[device_page]
                self.pool.memory[host_page] = Page(page.before, list(page.tokens))
            else:
                self.pool.memory[host_page] = Page(b"half-written", [], is_corrupt=True)
        self.outbox.append(
            storage_events.BackupDone(
                storage_id=self.storage_id,
                incarnation=self.incarnation,
                transfer_id=order.transfer_id,
                ok=is_ok,
                error="" if is_ok else "made to fail",
            )
        )
