"""Plain data: orders in flight (backups, saves, fetches, loads, promotions), and what object stores answered."""

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
        """Whether its deadline has passed without an answer."""
        return self.state is TransferState.LATE

    @property
    def is_called_off(self) -> bool:
        """Whether its result is not needed any more, late or not."""
        return self.state is not TransferState.UNDER_WAY

    def expire(self) -> None:
        """Note that the deadline passed. Raises IllegalTransition for one that is late already."""
        self.state = next_transfer_state(self.state, TransferEvent.EXPIRE)

    def call_off(self) -> None:
        """Call off a fetch that no request needs any more. Repeats are harmless."""
        self.state = next_transfer_state(self.state, TransferEvent.CALL_OFF)


class Flush(msgspec.Struct):
    """A tier of one namespace that is being emptied (see :mod:`configure`).

    ``left`` are ids of nodes, the next at the end: one that is positive has its children put before it, a negative one
    is dropped if it may be.
    """

    tier: str
    left: list[int]


class Transfer(UnderWay):
    """A backup that the storage has not answered. ``nodes`` leave the device after it, each child before its parent.

    The copies of a late one are not used. A node without ``backup_pages`` needs no copy and only waits for its
    children to leave.

    ``held`` are host pages that belong to no node any more; they are free again after the answer.
    """

    transfer_id: int
    storage_id: str
    worker_id: str  # "" once the worker is lost.
    nodes: list[int]
    timer_id: str
    held: bytes = b""
    stays: bool = False  # Its nodes stay on the device: it only makes copies ahead of an eviction.


class Save(UnderWay):
    """A ``SaveChunks`` that the storage has not answered.

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
    """A ``FetchChunks`` that is not over.

    It brings tokens [depth, end of ``tokens``) of a sequence; ``pages`` (packed, one entry a page from ``depth``
    on) are the leased host pages that no node has yet, -1 where there is none (any more). The first ``chunks``
    chunks are in the tree.
    """

    fetch_id: int
    storage_id: str
    namespace: str
    tokens: bytes
    depth: int
    pages: bytes
    timer_id: str
    chunks: int = 0
    waiters: dict[str, None] = {}  # Waiting requests that it is for, whether or not they are deferred until it is over.
    names: bytes = b""  # Names of its chunks, 16 bytes each.
    remote_chunks: int = 0  # How many of ``chunks`` came from the object store.
    queued_bytes: float = 0.0  # Bytes of other fetches in flight when it was ordered.
    predicted_us: float = 0.0  # Predicted time of fetching and loading it; 0 where it is unknown.
    is_warming: bool = False  # It is for no waiting request (see :mod:`warming`).
    lender_id: str = ""  # Storage whose host pool it reads; "" is its own disk or object store.
    lent_node: int = 0  # The deepest node whose copies are locked there; 0 is none, or none any more.
    lent_from: int = 0  # Where the highest of the locked nodes begins, in tokens.


NOWHERE = -1
"""Entry of a fetch's pages where it leases no page: the tree has the KV already."""


def leased_pages(pages: bytes) -> int:
    """Return how many entries of a fetch's pages (packed int32) are pages, not :data:`NOWHERE`."""
    return len(pages) // PAGE_NUMBER_BYTES - unpack_int32(pages).count(NOWHERE)


PACKED_NOWHERE = np.int32(-1).tobytes()
"""Entry of a packed page list for a page that is not read from that pool."""


class Chunk(msgspec.Struct):
    """A chunk of an outstanding batch: tokens [start, end) of a request's attempt, computed or restored."""

    request_id: str
    attempt: int
    start: int
    end: int
    is_restored: bool = False


class Load(UnderWay):
    """A load of an outstanding batch. It fills the ``loading`` pages of ``node`` and of the nodes above it.

    It begins ``depth`` tokens below the root; nodes loading above that belong to another load of the batch.
    ``storage_id`` is "" once that storage is lost. It is called off when its request left before it
    had produced a token, so that nothing proves that the load took place.
    """

    request_id: str
    attempt: int
    node: int
    storage_id: str
    depth: int = 0
    neighbour_id: str = ""  # Worker whose device it reads instead of a host pool; the path to ``node`` is locked there.


class Batch(msgspec.Struct):
    """A ``RunBatch`` that is not answered yet. ``tokens`` is the sum of its chunks."""

    plan: int
    chunks: list[Chunk]
    loads: list[Load]
    tokens: int = 0


class Promotion(msgspec.Struct):
    """A ``PromotePages`` that is not answered yet. It fills the ``loading`` pages of these nodes.

    ``storage_id`` is "" once that storage is lost. A node that was cut since stands for all its parts.
    """

    promotion_id: int
    storage_id: str
    nodes: list[int]


class LateRead(msgspec.Struct):
    """A read of a neighbour's device that a lost worker may still be making: the path to ``node`` stays locked."""

    neighbour_id: str
    node: int


class FetchedKv(msgspec.Struct):
    """KV that was fetched for a request and is to be loaded: predicted time of both, and observed time of the fetch."""

    tokens: int
    predicted_us: float
    disk_us: float


class Work(msgspec.Struct):
    """Requests and batches that a worker was told to compute."""

    running: list[str] = []  # Admitted requests in order of admission.
    batches: list[Batch] = []  # Outstanding, oldest first.
    unplanned: int = 0  # Tokens of running requests for which no chunk was sent yet.
    outstanding: int = 0  # Tokens of the chunks of ``batches``.


class Moves(msgspec.Struct):
    """Copies that leave and enter a worker's device pool."""

    leaving: int = 0  # Unlocked device pages that running backups will free.
    promotion: Promotion | None = None
    is_promotion_due: bool = False  # It has prefilled something since its last promotion was planned.
    uncopied: dict[int, None] = {}  # Ends of computed sequences that may have no host copy, the last used at the end.
    neighbours: dict[
        str, bool
    ] = {}  # Workers whose pools it was told to map, and whether loads from them may be planned.


class DiskTier(msgspec.Struct):
    """Disk and object store below a storage's host pool, and saves in flight to them."""

    budget_bytes: int = 0  # Budget of its disk tier; 0 is none.
    has_remote: bool = False
    chunks: dict[bytes, None] = {}  # Chunks on its disk, as far as it reported.
    saving: dict[bytes, int] = {}  # Chunks being saved to it, and by which save.
    unsaved: dict[int, int] = {}  # Paths without room so far (:mod:`unsaved`): their ends, and the first chunk to save.
    late_saves: int = 0  # Saves whose deadline passed and that it has not answered yet.
    taken: dict[bytes, None] = {}  # Chunks that it took lately and does not have on its disk.
    taken_from: int = 0  # First save that counts for ``taken``: chunks of earlier ones were flushed.


class StoreLacks(msgspec.Struct):
    """Tokens of one request from which on the object store has nothing, by form; -1 is not known."""

    kv_from: int = -1
    hidden_from: int = -1

    def is_known(self, form: ChunkForm, start: int) -> bool:
        """Return whether the store is known to have nothing from token ``start`` on. Does not change the state."""
        lacking_from = self.hidden_from if form == HIDDEN else self.kv_from
        return 0 <= lacking_from <= start

    def note(self, form: ChunkForm, start: int) -> None:
        """Note that the store has nothing of the request's prefix in this form from token ``start`` on."""
        if form == HIDDEN:
            self.hidden_from = start
        else:
            self.kv_from = start


class StoreBlanks(msgspec.Struct):
    """Successive requests for which an object store had nothing, or was not asked any more, by form."""

    kv: int = 0
    hidden: int = 0

    def of(self, form: ChunkForm) -> int:
        """Return how many there were in a row. Does not change the state."""
        return self.hidden if form == HIDDEN else self.kv

    def note_nothing(self, form: ChunkForm) -> None:
        """Note one more request for which the store had nothing in this form."""
        if form == HIDDEN:
            self.hidden += 1
        else:
            self.kv += 1

    def note_something(self, form: ChunkForm) -> None:
        """Note that the store has chunks in this form, so that it is worth asking."""
        if form == HIDDEN:
            self.hidden = 0
        else:
            self.kv = 0


class Fetching(msgspec.Struct):
    """A storage's fetches from its disk and object store, for whom they are, and its observed speeds."""

    chunks: dict[bytes, int] = {}  # Chunks being fetched by it, and by which fetch.
    pages: int = 0  # Host pages leased to fetches that are not over.
    late: int = 0  # Fetches whose deadline passed and that it has not answered yet.
    ahead: dict[str, int] = {}  # Host pages that were fetched for requests which still wait.
    due: dict[str, None] = {}  # Requests whose fetch waits for room, first come first served.
    tokens: float = 0.0  # Tokens that it fetched lately.
    us: float = 0.0  # How long that took.
    disk_rate: Rate = msgspec.field(default_factory=Rate)  # Bytes read for fetches, as observed.
    disk_bytes_per_s: float = 0.0  # Limit for reads of its disk; 0 is none.
    blanks: StoreBlanks = msgspec.field(default_factory=StoreBlanks)
    overruled: int = 0  # Decisions since the last trial that rested on observed rates alone (see :mod:`exploration`).
    held: dict[str, int] = {}  # Deepest host copies that waiting requests count on, by request (see :mod:`victims`).
    lender_rate: Rate = msgspec.field(default_factory=Rate)  # Bytes read from other nodes' host memory, as observed.
    measured_bytes_per_s: float = 0.0  # Speed of its disk as the storage measured it; 0 is not known.
    declined_loans: int = 0  # Loans not made because of an observed rate (see :mod:`exploration`).
