"""A virtual storage: it creates its host pool at once, copies over its workers' links, and may have a disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.chunks import chunk_tokens
from shared.errors import InternalError
from shared.messages import storage_events as events
from shared.messages import storage_plans as plans
from shared.messages.base import unpack_int32
from shared.messages.pools import PoolHandle
from thermocline.simulate.cost import Costs, backup_s
from thermocline.simulate.disk import Fetched, VirtualDisk
from thermocline.simulate.events import NS_PER_S, to_ns
from thermocline.simulate.link import Channel, Link

LENT_LATENCY_S = 1e-4
"""Latency of another node's host memory, in seconds."""


class VirtualStorage:
    """One node's storage. ``links`` are those of the node's workers, by worker id. There is no object store."""

    def __init__(
        self,
        storage_id: str,
        incarnation: str,
        pages: int,
        costs: Costs,
        links: dict[str, Link],
        disk: VirtualDisk,
        tell: Callable[[list[Any]], None],
        network: Channel | None = None,
        network_bytes_per_s: float = 0.0,
    ) -> None:
        """``network`` is the channel into its node, where nodes read one another's host memory."""
        self.storage_id = storage_id
        self.incarnation = incarnation
        self.backups = 0
        self.backed_up_tokens = 0
        self._pages = pages
        self._costs = costs
        self._links = links
        self.disk = disk
        self._tell = tell
        self._network, self._network_bytes_per_s = network, network_bytes_per_s
        self._page_bytes = 0
        self.borrowed_tokens = 0

    def deliver(self, orders: list[tuple[int, plans.StorageOrder]]) -> None:
        """Carry out orders, (plan number, order) in sequence. Raises InternalError for an unknown order."""
        for _, order in orders:
            match order:
                case plans.CreateHostPool():
                    self._create(order)
                case plans.BackupPages():
                    self._backup(order)
                case plans.SaveChunks():
                    self._save(order)
                case plans.FetchChunks():
                    self._fetch(order) if order.lender is None else self._borrow(order)
                case plans.CancelFetch():
                    self.disk.cancel(order.fetch_id)
                case plans.PinChunks():
                    self.disk.pin(order)
                case plans.DropChunks():
                    self._drop(order)
                case plans.AttachDevicePool() | plans.DetachDevicePool():
                    pass  # Every link is there from the start.
                case _:
                    raise InternalError(f"{self.storage_id} cannot carry out {type(order).__name__}")

    def _create(self, order: plans.CreateHostPool) -> None:
        self._page_bytes = order.geometry.page_bytes
        handle = PoolHandle(
            kind="shm",
            layout="page_first",
            name=self.incarnation,
            nbytes=self._pages * order.geometry.page_bytes,
            pages=self._pages,
            geometry=order.geometry,
        )
        self._say(events.HostPoolCreated, handle=handle)

    def _backup(self, order: plans.BackupPages) -> None:
        tokens = len(order.device_pages) // 4 * self._costs.page_size
        self.backups += 1
        self.backed_up_tokens += tokens

        def done(elapsed_ns: int) -> None:
            self._say(events.BackupDone, transfer_id=order.transfer_id, ok=True, seconds=elapsed_ns / NS_PER_S)

        self._links[order.worker_id].down.copy(to_ns(backup_s(self._costs, tokens)), done)

    def _save(self, order: plans.SaveChunks) -> None:
        """Save chunks; pages that are not in host memory are copied over their worker's link first."""

        def saved(chunks: bytes, dropped: bytes, nbytes: int) -> None:
            self._say(events.ChunksSaved, save_id=order.save_id, chunks=chunks, dropped=dropped, nbytes=nbytes)

        from_device = unpack_int32(order.host_pages).count(-1)
        if not from_device:
            self.disk.save(order, saved)
            return
        duration_ns = to_ns(backup_s(self._costs, from_device * self._costs.page_size))
        self._links[order.worker_id].down.copy(duration_ns, lambda _: self.disk.save(order, saved))

    def _fetch(self, order: plans.FetchChunks) -> None:
        def fetched(so_far: Fetched) -> None:
            self._say(
                events.ChunksFetched,
                fetch_id=order.fetch_id,
                chunks=so_far.chunks,
                is_over=so_far.is_over,
                disk_chunks=so_far.chunks,
                missing=so_far.missing,
                nbytes=so_far.nbytes,
                seconds=so_far.seconds,
            )

        self.disk.fetch(order, fetched)

    def _borrow(self, order: plans.FetchChunks) -> None:
        """Copy all pages from the lender in one piece: they are locked there, so none is missing."""
        assert self._network is not None
        pages = len(order.host_pages) // 4
        wanted = pages - unpack_int32(order.host_pages).count(-1)
        nbytes = wanted * self._page_bytes
        chunks = pages * self._costs.page_size // chunk_tokens(self._costs.page_size)
        self.borrowed_tokens += wanted * self._costs.page_size

        def done(elapsed_ns: int) -> None:
            self._say(
                events.ChunksFetched,
                fetch_id=order.fetch_id,
                chunks=chunks,
                is_over=True,
                lent_chunks=chunks,
                nbytes=nbytes,
                seconds=elapsed_ns / NS_PER_S,
            )

        self._network.copy(to_ns(LENT_LATENCY_S + nbytes / self._network_bytes_per_s), done)

    def _drop(self, order: plans.DropChunks) -> None:
        if "disk" in order.tiers:
            self._say(events.ChunksDropped, chunks=self.disk.drop(order.namespace))

    def _say(self, kind: type[Any], **fields: Any) -> None:
        self._tell([kind(storage_id=self.storage_id, incarnation=self.incarnation, **fields)])
