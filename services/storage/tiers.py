"""The tiers below host memory, joined: the handling of each order, and the tasks in the background.

The tiers are there from the start; the pipelines between them and a pool, be it the host pool or the hidden pool, are
made when the pool is, because the size of a buffer follows from its geometry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from services.storage import measures
from services.storage.chunk_keys import ChunkKeys
from services.storage.config import StorageConfig
from services.storage.core.fetch_progress import FetchProgress
from services.storage.disk_forms import UnreadForms, shapes_of
from services.storage.disk_tier import DiskTier
from services.storage.drops import Drops
from services.storage.heat_notes import HeatNotes
from services.storage.io_threads import IoThreads
from services.storage.media import Media
from services.storage.paced_reads import PacedReads
from services.storage.page_gate import PageGate
from services.storage.pipelines import Below, Pipelines, form_of, make_pipelines
from services.storage.pools import Pools
from services.storage.reconciliation import Reconciliation
from services.storage.remote_tier import RemoteTier
from services.storage.scrubber import Scrubber
from services.storage.sharing.parts import Sharing
from services.storage.sparse.parts import SparseParts
from services.storage.sparse.reader import SparseReader
from services.storage.tier_counters import disk_counters, pipeline_counters, remote_counters, upload_counters
from services.storage.tier_events import TierEvents
from services.storage.tier_watch import Fault, TierWatch
from services.storage.uploads import Uploads
from services.storage.warm_start import WarmStart
from shared import logs
from shared.bus.protocol import Bus
from shared.chunks import geometry_id
from shared.errors import ConfigError, InvalidRequest, QueueFull
from shared.event_outbox import EventOutbox
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.pools import HIDDEN, ChunkForm, KvGeometry, form_name
from shared.messages.status import OWNERS_TOLD, ChunksVerified, VerifyChunks
from shared.messages.storage_plans import DropChunks, FetchChunks, PinChunks, SaveOrder
from shared.tracing import Tracer

STOPPING = "the storage is stopping"

LAST_NOTE_S = 5.0
"""Longest wait at the end for the note of heats."""

_log = logs.get_logger("storage")


class Tiers:
    """All tiers below host memory.

    Owned by the event loop; ``run`` ends after :meth:`stop`, when everything under way was answered.
    """

    def __init__(
        self,
        config: StorageConfig,
        media: Media,
        pools: Pools,
        gate: PageGate,
        outbox: EventOutbox,
        *,
        incarnation: str,
        confirm: Callable[[], Awaitable[None]],
        bus: Bus,
        tracer: Tracer | None = None,
    ) -> None:
        """Join the tiers of ``media``, whose backends the caller closes; nothing runs before :meth:`run`.

        ``sharing`` is to be started before the storage joins.
        ``gate`` guards the pages of the host pool; the hidden pool has a gate of its own. ``outbox`` takes the events
        for the scheduler. ``confirm`` returns once the scheduler has confirmed that this storage is a member, and
        raises otherwise (:mod:`services.storage.standing`).
        """
        self._config = config
        self._pools = pools
        # A gate for each pool, because their page numbers are independent.
        self._gates: dict[ChunkForm, PageGate] = {"kv": gate, HIDDEN: PageGate()}
        self._confirm = confirm
        self._tracer = tracer
        self._cipher = media.cipher
        self._keys = ChunkKeys(media.cipher)
        self._names = media.names
        self._threads = IoThreads(config.io_threads)
        self.sharing = Sharing(config, bus, pools, self._threads, incarnation)
        pace = PacedReads(config.disk_read_bytes_per_s)
        self._disk = DiskTier(media.disk, config.disk_kv_bytes, self._threads, pace=pace) if media.disk else None
        timeout_s, directories = config.remote_timeout_ms / 1000, config.disk_dir
        self._remote = (
            RemoteTier(media.remote, self._threads, timeout_s=timeout_s, directories=directories)
            if media.remote
            else None
        )
        self._events = TierEvents(
            outbox,
            lambda key: self._disk is not None and key in self._disk,
            storage_id=config.id,
            incarnation=incarnation,
        )
        self._uploads: Uploads | None = None
        self._reconciliation: Reconciliation | None = None
        if self._remote is not None and self._disk is not None:
            self._uploads = Uploads(self._remote, self._disk, self._threads, self._keys, on_bad=self._events.dropped)
            self._reconciliation = Reconciliation(self._disk, self._remote, self._uploads, media.names)
        self._warm_start = WarmStart(self._disk, self._events) if self._disk else None
        self._drops = Drops(
            disk=self._disk,
            remote=self._remote,
            uploads=self._uploads,
            reconciliation=self._reconciliation,
            warm_start=self._warm_start,
            threads=self._threads,
            events=self._events,
        )
        self._scrubber = Scrubber(self._disk, self._events, self._keys.cipher) if self._disk else None
        self._heats = HeatNotes(self._disk, self._warm_start) if self._disk and self._warm_start else None
        self._watch = TierWatch(self._disk, self._warm_start, self._remote, self._events, self._reconciliation)
        self.measured_bytes_per_s = media.disk_bytes_per_s
        self.shapes = shapes_of(media.disk)  # Shapes on the disk, as announced to the cell.
        self._unread: UnreadForms | None = None
        self._lacks_readers = False  # The scheduler said that no worker reads parts of chunks.
        self._unserved: dict[ChunkForm, str] = {}  # Reasons by form for which there is no memory.
        self._pipelines: dict[ChunkForm, Pipelines] = {}
        self._why_closed: dict[ChunkForm, str] = {
            "kv": "there is no host pool yet",
            HIDDEN: "there is no hidden pool yet",
            "sparse": "no order names copies",
        }
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._endless: list[asyncio.Task[None]] = []
        self._saving: list[asyncio.Task[None]] = []

    @property
    def disk_bytes(self) -> int:
        """Budget of the disk; 0 is none."""
        return self._disk.index.quota if self._disk else 0

    @property
    def has_remote(self) -> bool:
        """Whether an object store is configured, reachable or not."""
        return self._remote is not None

    @property
    def hidden_bytes(self) -> int:
        """Budget of the hidden pool; 0 is none, as where no tier below could keep hidden states."""
        return self._config.hidden_bytes if self._disk or self._remote else 0

    @property
    def keeps_sparse(self) -> bool:
        """Whether KV is kept on the disk a second time, in a form that can be read in parts."""
        return self._config.sparse and self._disk is not None

    @property
    def sparse(self) -> SparseReader | None:
        """Reader of parts of KV; None while there is no host pool, where that form is not kept, and at the end."""
        made = self._pipelines.get("kv")
        return made.sparse.reader if made is not None and made.sparse is not None else None

    def open(self, geometry: KvGeometry, *, is_read_in_part: bool = True) -> None:
        """Start the pipelines of a pool of this geometry, and report the disk's chunks of it to the scheduler.

        Unless its chunks are read in part by some worker, no sparse copies are kept of them.
        """
        form = form_of(geometry)
        lenders = self.sharing.lenders if form == "kv" else None
        if form in self._pipelines or self._group is None or not (self._disk or self._remote or lenders):
            return
        below = Below(
            self._disk,
            self._remote,
            self._uploads,
            self._threads,
            self._keys,
            self._events,
            self._tracer,
            lenders,
            self._config.disk_read_bytes_per_s or self.measured_bytes_per_s,
        )
        try:
            if lenders is not None:
                lenders.open(geometry)
            made = make_pipelines(
                geometry,
                below,
                self._config,
                self._pools,
                self._gates[form],
                self._confirm,
                is_read_in_part=is_read_in_part,
            )
        except ConfigError as error:
            measures.TIER_FAILURES.labels("staging").inc()
            _log.error("tiers_left_out", form=form_name(form), reason=error.message)
            self._why_closed[form] = self._unserved[form] = error.message
            return
        shape = geometry_id(geometry)
        if form == "kv" and not is_read_in_part:
            self._lacks_readers = True
            _log.info("sparse_left_out", reason="no worker reads parts of chunks")
        if form == HIDDEN:
            self._unread = UnreadForms(geometry, self.shapes)
        self._pipelines[form] = made
        self._saving.append(self._group.create_task(made.saver.run()))
        self._know(shape, form)
        if self._scrubber is not None:
            self._scrubber.add(geometry, made.buffers)
        if self._uploads is not None:
            self._uploads.open(geometry, made.buffers)
        if self._reconciliation is not None:
            self._reconciliation.want()
        if self._warm_start is not None:
            self._endless.append(self._group.create_task(self._warm_start.announce(shape)))
        if made.sparse is not None:
            self._open_sparse(made.sparse, self._group)

    def _open_sparse(self, sparse: SparseParts, group: asyncio.TaskGroup) -> None:
        """Start the tasks that write and scrub sparse copies of what is saved."""
        self._saving.append(group.create_task(sparse.copies.run()))
        self._know(sparse.layout.shape, "sparse")
        if self._scrubber is not None:
            self._scrubber.add_sparse(sparse.layout, sparse.scrubbing)
        if self._warm_start is not None:
            self._endless.append(group.create_task(self._warm_start.announce(sparse.layout.shape)))

    def _know(self, shape: bytes, form: ChunkForm) -> None:
        """Make chunks of this shape known to the cell: they are reported, and pinned with those of other forms."""
        if self._disk is not None:
            for pinned in self._events.forms:
                self._disk.index.pin_alike(pinned, shape)
        self._events.forms[shape] = form

    async def save(self, order: SaveOrder) -> None:
        """Queue a save, or answer it with an error."""
        await self._own(order)
        made = self._pipelines.get(order.form)
        if made is None:
            await self._events.saved(order.save_id, form=order.form, error=self._reason(order.form))
        else:
            await made.saver.add(order)

    async def fetch(self, order: FetchChunks) -> None:
        """Queue a fetch, or answer it with an error."""
        await self._own(order)
        made = self._pipelines.get(order.form)
        if made is None:
            nothing, reason = FetchProgress(0), self._reason(order.form)
            await self._events.fetched(order.fetch_id, nothing, form=order.form, is_over=True, error=reason)
        else:
            await made.fetcher.add(order)

    async def _own(self, order: SaveOrder | FetchChunks) -> None:
        """Learn the owner and key of an order's chunks, and keep the owner within its quotas before more comes."""
        self._names.learn(order.namespace, self._keys.key_id(order.key_id))
        if order.quota is None:
            return
        if self._remote is not None:
            self._remote.owners.learn(order.namespace, order.quota.owner, order.quota.remote_bytes)
        if self._disk is not None:
            await self._events.dropped(await self._disk.own(order.namespace, order.quota))

    def cancel(self, fetch_id: int) -> None:
        """Cut a fetch of either form off."""
        for made in self._pipelines.values():
            made.fetcher.cancel(fetch_id)

    def pin(self, order: PinChunks) -> None:
        """Pin or unpin chunks of the cell in every form. Raises InvalidRequest, or QueueFull beyond the bound."""
        if self._disk is None:
            return
        if len(order.chunks) % DIGEST_BYTES:
            raise InvalidRequest(f"{len(order.chunks)} bytes are no list of chunks")
        index = self._disk.index
        for identity in split_digests(order.chunks):
            for shape in self._events.forms:
                if not order.is_pinned:
                    index.unpin(identity, shape)
                elif not index.pin(identity, shape):
                    raise QueueFull(f"{index.pinned} chunks are pinned already")

    def drop(self, order: DropChunks) -> None:
        """Queue a drop. Raises QueueFull."""
        made = list(self._pipelines.values())
        promotions = [pipelines.promotions for pipelines in made if pipelines.promotions is not None]
        copies = [pipelines.sparse.copies for pipelines in made if pipelines.sparse is not None]
        self._drops.add(order, [pipelines.saver for pipelines in made], promotions, copies)

    async def verify(self, call: VerifyChunks) -> ChunksVerified:
        """Check chunks of the disk."""
        if self._scrubber is None or not self._pipelines:
            return ChunksVerified(checked=0, nbytes=0)
        return await self._scrubber.verify(call)

    async def first_look(self) -> None:
        """Look for faults of the tiers before the storage joins; bounded in time."""
        await self._watch.first_look()

    def faults(self) -> Iterator[Fault]:
        """Yield features that the tiers were asked for and lack now."""
        yield from self._watch.faults()
        yield from self._drops.faults()
        yield from self.sharing.faults()
        for form, reason in self._unserved.items():
            yield f"{form_name(form)} below host memory", reason, "--staging-bytes"
        if (
            self._unread is not None
            and self._disk is not None
            and self._warm_start
            and self._warm_start.is_over.is_set()
        ):
            yield from self._unread.faults(self._disk.index)
        made = self._pipelines.get("kv")
        if self.keeps_sparse and made is not None and made.sparse is None and not self._lacks_readers:
            yield (
                "sparse",
                "copies that can be read in part cannot be kept; the log of the storage says why",
                "--sparse",
            )
        if self._cipher is not None and (fault := self._cipher.keys.fault):
            yield "keys", fault, "--keys"

    def owned_bytes(self) -> dict[str, int]:
        """Return the bytes on the disk by owner; empty without a disk."""
        return self._disk.index.owned_bytes(OWNERS_TOLD) if self._disk is not None else {}

    def counters(self) -> dict[str, int]:
        """Return all counters for the inventory."""
        counters = {"drops_outstanding": len(self._drops)}
        if self._disk is not None:
            counters |= disk_counters(self._disk)
        if self._remote is not None:
            counters |= remote_counters(self._remote)
        if self._uploads is not None and self._reconciliation is not None:
            counters |= upload_counters(self._uploads, self._reconciliation)
        return counters | pipeline_counters(self._pipelines)

    async def run(self) -> None:
        """Work until :meth:`stop`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._endless.append(group.create_task(self._drops.run()))
            self._endless.append(group.create_task(self._watch.run()))
            if self._uploads is not None:
                self._endless.append(group.create_task(self._uploads.run()))
            if self._disk is not None and self._warm_start is not None:
                group.create_task(self._disk.removals.run())
                self._endless.append(group.create_task(self._warm_start.scan()))
                if self._reconciliation is not None and self._remote is not None:
                    self._endless.append(group.create_task(self._remote.owners.run()))
                    self._endless.append(group.create_task(self._reconcile(self._reconciliation, self._remote)))
            if self._heats is not None:
                self._endless.append(group.create_task(self._heats.run()))
            await self._stopping.wait()
            self._group = None
            self._why_closed = dict.fromkeys(self._why_closed, STOPPING)
            ended, self._pipelines = list(self._pipelines.values()), {}
            for made in ended:
                await made.stop(STOPPING)
            await asyncio.gather(*self._saving)  # These need removals to run.
            for made in ended:
                if made.promotions is not None:
                    await made.promotions.ended()
            for task in self._endless:
                task.cancel()
            if self._disk is not None:
                self._disk.removals.stop()
        if self._heats is not None:
            await self._note_heats(self._heats)
        for made in ended:
            made.buffers.close()
            if made.sparse is not None:
                made.sparse.close()
        if self.sharing.lenders is not None:
            self.sharing.lenders.close()
        self._threads.close()
        if self._disk is not None:
            self._disk.directories.close()

    async def _note_heats(self, heats: HeatNotes) -> None:
        try:
            async with asyncio.timeout(LAST_NOTE_S):
                await heats.note()
        except TimeoutError:
            _log.warning("heats_not_noted", reason=f"the disk took longer than {LAST_NOTE_S:.0f} s")

    @property
    def is_hung(self) -> bool:
        """Whether a thread still waits for a disk that does not answer: it would keep the process from ending."""
        return self._disk is not None and len(self._disk.directories.abandoned) > 0

    async def _reconcile(self, reconciliation: Reconciliation, remote: RemoteTier) -> None:
        await remote.owners.load()
        if self._warm_start is not None:
            await reconciliation.run(self._warm_start.is_over)

    def stop(self) -> None:
        """Begin nothing more; orders under way are finished or cut off, and answered."""
        self._stopping.set()

    def _reason(self, form: ChunkForm) -> str:
        has_any = self._disk or self._remote or self.sharing.lenders
        return self._why_closed[form] if has_any else "this storage has neither disk nor object store"
