"""What was ordered and is not answered, and what an object store answered: backups, saves, fetches, loads, promotions.

Plain data.
"""

from __future__ import annotations

import msgspec
import numpy as np

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.lifecycle import TransferEvent, TransferState, next_transfer_state
from services.scheduler.core.speed_fit import Rate
from shared.messages.base import unpack_int32
from shared.messages.pools import HIDDEN, ChunkForm


class UnderWay(msgspec.Struct, kw_only=True):
    """An order that moves KV or hidden states and is not answered yet (see :data:`lifecycle.TRANSFER_TRANSITIONS`)."""

    state: TransferState = TransferState.UNDER_WAY

    @property
    def is_late(self) -> bool:
        """Whether its deadline passed."""
        return self.state is TransferState.LATE

    @property
    def is_called_off(self) -> bool:
        """Whether what it brings is not needed any more, late or not."""
        return self.state is not TransferState.UNDER_WAY

    def expire(self) -> None:
        """Its deadline passed. Raises IllegalTransition where it can have none any more."""
        self.state = next_transfer_state(self.state, TransferEvent.EXPIRE)

    def call_off(self) -> None:
        """Call off a fetch that no request needs any more. Repeats are harmless."""
        self.state = next_transfer_state(self.state, TransferEvent.CALL_OFF)


class Flush(msgspec.Struct):
    """One tier of one namespace that is being emptied (see :mod:`configure`).

    ``left`` are ids of nodes, the next at the end: one that is positive has its children put before it, a negative one
    is dropped if it may be.
    """

    tier: str
    left: list[int]


class Transfer(UnderWay):
    """A backup that the storage has not answered. ``nodes`` leave the device after it, each child before its parent.

    A late one copies in vain. A node without ``backup_pages`` needs no copy and only waits for its children to
    leave.

    ``held`` are host pages that no node stands for any more; they are free again after the answer.
    """

    transfer_id: int
    storage_id: str
    worker_id: str  # "" once the worker is lost.
    nodes: list[int]
    timer_id: str
    held: bytes = b""
    stays: bool = False  # Its nodes stay on the device: it only makes copies ahead of an eviction.


class Save(UnderWay):
    """A SaveChunks that the storage has not answered.

    ``node`` is the deepest node whose pages on the worker's device are read (0 is none): the path to it is locked
    there. Host pages need no lock (see ``SaveChunks``).
    """

    save_id: int
    storage_id: str
    worker_id: str  # "" where no device is read, and once the worker is lost.
    node: int
    chunks: bytes
    timer_id: str


class Fetch(UnderWay):
    """A FetchChunks that is not over.

    It brings tokens [depth, end of ``tokens``) of a sequence; ``pages`` (packed, one entry a page from ``depth``
    on) are the leased host pages that no node stands for yet, -1 where none is (any more). The first ``chunks`` are
    in the tree.
    """

    fetch_id: int
    storage_id: str
    namespace: str
    tokens: bytes
    depth: int
    pages: bytes
    timer_id: str
    chunks: int = 0
    waiters: dict[str, None] = {}  # Waiting requests that it is for, deferred until it is over or not.
    names: bytes = b""  # Of its chunks, 16 bytes each.
    remote_chunks: int = 0  # Of ``chunks``: from the object store.
    queued_bytes: float = 0.0  # Of other fetches, when it was ordered.
    predicted_us: float = 0.0  # What fetching and loading it should take; 0 where it is unknown.
    is_warming: bool = False  # It is for no waiting request (see :mod:`warming`).
    lender_id: str = ""  # Whose host pool it reads; "" is its own disk or object store.
    lent_node: int = 0  # The deepest node whose copies are locked there; 0 is none, or none any more,
    lent_from: int = 0  # and where the highest of them begins, in tokens.


NOWHERE = -1
"""Stands in a fetch's pages where the tree has the KV already."""


def leased_pages(pages: bytes) -> int:
    """Entries of a fetch's pages that are pages."""
    return len(pages) // PAGE_NUMBER_BYTES - unpack_int32(pages).count(NOWHERE)


PACKED_NOWHERE = np.int32(-1).tobytes()
"""In a packed page list: this page is not read from that pool."""


class Chunk(msgspec.Struct):
    """A chunk of an outstanding batch: tokens [start, end) of a request's attempt, computed or restored."""

    request_id: str
    attempt: int
    start: int
    end: int
    is_restored: bool = False


class Load(UnderWay):
    """A load of an outstanding batch. It fills the ``loading`` pages of ``node`` and of the nodes above it.

    It begins ``depth`` tokens below the root; what is loading above that belongs to another load of the batch.
    ``storage_id`` is "" once that storage is lost. It is called off when its request left before it
    had produced a token, so that nothing proves that the load took place.
    """

    request_id: str
    attempt: int
    node: int
    storage_id: str
    depth: int = 0
    neighbour_id: str = ""  # Whose device it reads instead of a host pool, where the path to ``node`` is locked.


class Batch(msgspec.Struct):
    """A RunBatch that is not answered yet. ``tokens`` is the sum of its chunks."""

    plan: int
    chunks: list[Chunk]
    loads: list[Load]
    tokens: int = 0


class Promotion(msgspec.Struct):
    """A PromotePages that is not answered yet. It fills the ``loading`` pages of these nodes.

    ``storage_id`` is "" once that storage is lost. A node that was cut since stands for all its parts.
    """

    promotion_id: int
    storage_id: str
    nodes: list[int]


class LateRead(msgspec.Struct):
    """What a worker that was given up may still be reading of a neighbour's device: the path to ``node``, locked."""

    neighbour_id: str
    node: int


class FetchedKv(msgspec.Struct):
    """KV that was fetched for a request and is to be loaded: what both should take, and what the first part took."""

    tokens: int
    predicted_us: float
    disk_us: float


class Work(msgspec.Struct):
    """What a worker was told to compute."""

    running: list[str] = []  # Admitted requests in order of admission.
    batches: list[Batch] = []  # Outstanding, oldest first.
    unplanned: int = 0  # Tokens of running requests for which no chunk was sent yet.
    outstanding: int = 0  # Tokens of the chunks of ``batches``.


class Moves(msgspec.Struct):
    """What leaves and enters a worker's device pool."""

    leaving: int = 0  # Device pages that running backups will free, as far as is known.
    promotion: Promotion | None = None
    is_promotion_due: bool = False  # It has prefilled something since its last promotion was planned.
    uncopied: dict[int, None] = {}  # Ends of what it computed that may have no host copy, used last last.
    neighbours: dict[str, bool] = {}  # Whose pools it was told to map, and whether loads from them may be planned.


class DiskTier(msgspec.Struct):
    """What a storage has below its host pool, and what is on its way there."""

    budget_bytes: int = 0  # Budget of its disk tier; 0 is none.
    has_remote: bool = False
    chunks: dict[bytes, None] = {}  # What its disk holds, as far as it said.
    saving: dict[bytes, int] = {}  # Chunks on their way to it, by save.
    unsaved: dict[int, int] = {}  # What there was no room for (:mod:`unsaved`): ends of paths, and the first chunk.
    late_saves: int = 0  # Saves whose deadline passed and that it has not answered yet.
    taken: dict[bytes, None] = {}  # Chunks that it took and does not have on its disk, lately,
    taken_from: int = 0  # by saves from this one on: those before it were flushed.


class StoreLacks(msgspec.Struct):
    """Tokens of one request from which on the object store has nothing, by form; -1 is not known."""

    kv_from: int = -1
    hidden_from: int = -1

    def is_known(self, form: ChunkForm, start: int) -> bool:
        """Whether the store has nothing from token ``start`` on. Does not mutate."""
        lacking_from = self.hidden_from if form == HIDDEN else self.kv_from
        return 0 <= lacking_from <= start

    def note(self, form: ChunkForm, start: int) -> None:
        """Note that the store had the request's prefix, or what it shares with another, up to here."""
        if form == HIDDEN:
            self.hidden_from = start
        else:
            self.kv_from = start


class StoreBlanks(msgspec.Struct):
    """Requests in a row for which an object store was asked for nothing, or was not asked any more, by form."""

    kv: int = 0
    hidden: int = 0

    def of(self, form: ChunkForm) -> int:
        """How many in a row. Does not mutate."""
        return self.hidden if form == HIDDEN else self.kv

    def note_nothing(self, form: ChunkForm) -> None:
        """Note a question in vain."""
        if form == HIDDEN:
            self.hidden += 1
        else:
            self.kv += 1

    def note_something(self, form: ChunkForm) -> None:
        """Note that the store has chunks in this form: it is worth asking."""
        if form == HIDDEN:
            self.hidden = 0
        else:
            self.kv = 0


class Fetching(msgspec.Struct):
    """What a storage brings up from its disk and object store, for whom, and how fast."""

    chunks: dict[bytes, int] = {}  # Chunks on their way up from it, by fetch.
    pages: int = 0  # Host pages leased to fetches that are not over.
    late: int = 0  # Fetches whose deadline passed and that it has not answered yet.
    ahead: dict[str, int] = {}  # Host pages that were fetched for requests which still wait.
    due: dict[str, None] = {}  # Requests whose fetch waits for room, first come first served.
    tokens: float = 0.0  # What it brought up lately, and how long that took.
    us: float = 0.0
    disk_rate: Rate = msgspec.field(default_factory=Rate)  # Bytes read for fetches, as observed.
    disk_bytes_per_s: float = 0.0  # What its disk may be read with at the most; 0 is no limit.
    blanks: StoreBlanks = msgspec.field(default_factory=StoreBlanks)
    overruled: int = 0  # Decisions since the last trial that only observed rates spoke for (see :mod:`exploration`).
    held: dict[str, int] = {}  # Deepest host copies that waiting requests count on, by request (see :mod:`victims`).
    lender_rate: Rate = msgspec.field(default_factory=Rate)  # Bytes read from other nodes' host memory, as observed.
    measured_bytes_per_s: float = 0.0  # What its disk was read with when the storage measured it; 0 is not known.
    declined_loans: int = 0  # That were not worth it by a rate that was observed (see :mod:`exploration`).
