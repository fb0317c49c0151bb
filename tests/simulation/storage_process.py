"""A simulated storage: carries plans out one after another, and fetches beside them, a chunk at a time."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from services.storage.neighbours import LOOK_S, SAID_AFTER_S
from shared.chunks import chunk_bytes
from shared.codec import Published
from shared.messages import storage_events, storage_plans
from shared.messages.base import unpack_int32
from shared.messages.pools import HIDDEN, KvGeometry, PoolHandle
from tests.simulation.contents import Copy, HostPool, Page, WrongContent, pieces, require
from tests.simulation.fetching import Fetching
from tests.simulation.process import Process, Receiver
from tests.simulation.saving import save
from tests.stateful.model_pages import geometry

if TYPE_CHECKING:
    from tests.simulation.cell import Cell
    from tests.simulation.disk import Disk
    from tests.simulation.worker_process import WorkerProcess

ORDER_US = 40
PAGE_US = 25
SEES_END = 0.8
"""How often a storage sees the end of a worker of its node; otherwise heartbeats have to tell of it."""


class StorageProcess(Process):
    """One incarnation. Its disk is the cell's, for it outlives it."""

    kind = "storage"

    def __init__(self, cell: Cell, name: str, incarnation: str, node: str) -> None:
        super().__init__(cell, name, incarnation)
        self.node = node
        self.pool: HostPool | None = None
        self.hidden_pool: HostPool | None = None
        self.devices: dict[tuple[str, str], WorkerProcess] = {}
        self.fetches: dict[int, Fetching] = {}
        self.pinned: dict[bytes, None] = {}
        self.sight = random.Random(f"{cell.scenario.seed}/{incarnation}/sight")
        self.stalled_to_ns = 0  # Its disk and its copies stand still until then; it itself does not.
        self._inbox: deque[storage_plans.StoragePlan] = deque()
        self._is_busy = False
        self._receiver = Receiver(self)

    @property
    def disk(self) -> Disk:
        return self.cell.disks[self.name]

    @property
    def is_listed(self) -> bool:
        """Whether the cell still counts on it."""
        return self.cell.lists("storage", self.name, self.incarnation)

    def is_confirmed(self) -> bool:
        """Whether a scheduler says now that the cell counts on it; as good as no where nobody can be asked."""
        return not self.is_cut_off and self.cell.is_confirmed("storage", self.name, self.incarnation)

    def start(self) -> None:
        """Join the cell."""
        shape = self.cell.scenario.shape
        self.tell(
            storage_events.StorageJoined,
            node=self.node,
            host_bytes=shape.host_pages,
            disk_bytes=shape.disk_chunks * chunk_bytes(geometry(shape.page_size)),
            disk_bytes_per_s=float(shape.disk_bytes_per_s),
            has_remote=shape.has_remote,
            hidden_bytes=shape.hidden_pages,
            keeps_sparse=shape.keeps_sparse,
            takes_compact=True,
        )

    def tell(self, kind: type, **fields: object) -> None:
        """Append an event of this incarnation."""
        self.say(kind(storage_id=self.name, incarnation=self.incarnation, **fields))

    def hear(self, plan: Published) -> None:
        """A plan came over core NATS."""
        self.take(self._receiver.hear(plan))

    def catch_up(self) -> None:
        """Look whether the last plans were missed."""
        self.take(self._receiver.read())

    def take(self, due: list[Published]) -> None:
        """Plans in order."""
        for plan in due:
            assert isinstance(plan, storage_plans.StoragePlan)
            self._inbox.append(plan)
        self._go()

    def drain(self) -> None:
        """End gracefully."""
        self.append(storage_events.StorageLeft(storage_id=self.name, incarnation=self.incarnation))
        self.end()

    def see_end(self, worker: WorkerProcess) -> None:
        """A worker of this node has ended: the next look shows it, and then it is said again and again."""
        if self.sight.random() >= SEES_END:
            return
        self.cell.seen["ends_of_workers_seen"] += 1
        look_us = self.sight.uniform(0, LOOK_S * 1e6)
        for after_s in SAID_AFTER_S:
            self.later(look_us + after_s * 1e6, partial(self.cell.tell_gone, self, worker))

    def _go(self) -> None:
        if self._is_busy or not self._inbox:
            return
        self._is_busy = True
        order = self._inbox.popleft().order
        pages = len(getattr(order, "identities", b"")) // 16
        if isinstance(order, storage_plans.FetchChunks):
            pages = 0
        stalled_us = max(0, self.stalled_to_ns - self.cell.clock.now_ns) / 1_000 if pages else 0
        self.later(ORDER_US + PAGE_US * pages + stalled_us, lambda: self._carry_out(order))

    def _carry_out(self, order: storage_plans.StorageOrder) -> None:
        self._is_busy = False
        match order:
            case storage_plans.CreateHostPool():
                self._create(order.geometry)
            case storage_plans.AttachDevicePool():
                key = (order.worker_id, order.worker_incarnation)
                self.devices[key] = self.cell.devices[key]
            case storage_plans.DetachDevicePool():
                self.devices.pop((order.worker_id, order.worker_incarnation), None)
            case storage_plans.BackupPages():
                self._back_up(order)
            case storage_plans.SaveChunks() | storage_plans.SaveTokens():
                save(self, order)
            case storage_plans.FetchChunks():
                self.fetches[order.fetch_id] = Fetching(self, order)
                self.fetches[order.fetch_id].start()
            case storage_plans.CancelFetch():
                if order.fetch_id in self.fetches:
                    self.fetches[order.fetch_id].is_cancelled = True
            case storage_plans.DropChunks():
                self._drop(order)
            case storage_plans.PinChunks():
                self._pin(order)
            case _:
                raise AssertionError(f"unknown order {order}")
        self._go()

    def _create(self, wanted: KvGeometry) -> None:
        form = HIDDEN if wanted.is_hidden else "kv"
        shape = self.cell.scenario.shape
        pages = shape.hidden_pages if wanted.is_hidden else shape.host_pages
        pool = HostPool(self.name, f"{self.incarnation}.{form}", pages)
        if wanted.is_hidden:
            require(self.pool is not None, "a hidden pool is made before the host pool")
            self.hidden_pool = pool
        else:
            self.pool = pool
        self.cell.host_pools[pool.name] = pool
        handle = PoolHandle(kind="shm", layout="page_first", name=pool.name, nbytes=0, pages=pages, geometry=wanted)
        self.tell(storage_events.HostPoolCreated, handle=handle, form=form)
        held = self.disk.form(form).held
        if held:
            self.tell(storage_events.ChunksListed, chunks=b"".join(held), form=form)
        if form == "kv" and self.disk.sparse:
            self.tell(storage_events.ChunksListed, chunks=b"".join(self.disk.sparse), form="sparse")

    def _back_up(self, order: storage_plans.BackupPages) -> None:
        assert self.pool is not None
        device = self.devices.get((order.worker_id, order.worker_incarnation))
        is_ok = device is not None and self.chance.random() >= self.cell.scenario.rates.bad_backups
        pairs = zip(unpack_int32(order.device_pages), unpack_int32(order.host_pages), strict=True)
        for (theirs, mine), identity in zip(pairs, pieces(order.identities), strict=True):
            page = self.device_page(device, theirs, identity)
            self.pool.memory[mine] = Copy(identity, page or Page(b"half-written"), page is None or not is_ok)
        error = "" if is_ok else "made to fail"
        self.tell(storage_events.BackupDone, transfer_id=order.transfer_id, ok=is_ok, error=error, seconds=0.001)

    def device_page(self, device: WorkerProcess | None, number: int, identity: bytes) -> Page | None:
        """What a page of a worker's device really holds now; nobody else may have written to it meanwhile.

        A worker that was given up promises nothing any more: what is read of it then nobody will ask for.
        """
        page = device.memory.get(number) if device is not None else None
        if device is not None and device.is_listed and self.is_listed and (page is None or page.identity() != identity):
            raise WrongContent(f"{device.name} page {number} holds {page}, and not what is to be copied")
        return page

    def _drop(self, order: storage_plans.DropChunks) -> None:
        """Whatever the namespace: a chunk here does not say whose it is, and to drop more is harmless."""
        if "remote" in order.tiers:
            self.cell.remote.kv.held.clear()
            self.cell.remote.hidden.held.clear()
        if "disk" in order.tiers:
            for form in ("kv", HIDDEN):
                names = list(self.disk.form(form).held)
                self.disk.form(form).held.clear()
                self.tell_dropped(names, form)

    def scrub(self) -> None:
        """Read all chunks of the disk, and quarantine those that are not what was written."""
        for form in ("kv", HIDDEN):
            chunks = self.disk.form(form)
            bad = [name for name in list(chunks.held) if chunks.find(name) is None]
            self.cell.seen["chunks_quarantined_by_scrubbing"] += len(bad)
            self.tell_dropped(bad, form)

    def tell_dropped(self, names: list[bytes], form: str) -> None:
        """These chunks are gone, and what of them could be read in part."""
        if names:
            self.tell(storage_events.ChunksDropped, chunks=b"".join(names), form=form)
        if form == "kv":
            self.forget_parts(names)

    def forget_parts(self, names: list[bytes]) -> None:
        """What could be read in part of chunks that are gone is gone too."""
        # On a small disk a save may displace a chunk, bring it again, and displace it once more.
        parts = [name for name in dict.fromkeys(names) if name in self.disk.sparse]
        for name in parts:
            del self.disk.sparse[name]
        if parts:
            self.tell(storage_events.ChunksDropped, chunks=b"".join(parts), form="sparse")

    def _pin(self, order: storage_plans.PinChunks) -> None:
        for name in pieces(order.chunks):
            if order.is_pinned:
                self.pinned[name] = None
            else:
                self.pinned.pop(name, None)
