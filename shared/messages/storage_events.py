"""What storages tell the scheduler. Subject family ``in.storage.<id>``."""

from __future__ import annotations

from msgspec import field

from shared.messages.base import Message
from shared.messages.pools import ChunkForm, PoolHandle

LISTED_AT_ONCE = 4096
"""Chunks that one ``ChunksListed`` names at the most."""


class StorageJoined(Message, frozen=True):
    """A storage is ready, with this many bytes for host KV. Its pools are empty.

    What its disk holds of the cell's geometry follows in ``ChunksListed`` after ``HostPoolCreated``, of either form.
    """

    storage_id: str
    incarnation: str
    node: str
    host_bytes: int
    disk_bytes: int = 0  # Budget of the disk tier; 0 is none.
    has_remote: bool = False  # It has an object store, which may hold what others wrote.
    hidden_bytes: int = field(name="state_bytes", default=0)  # Budget of a hidden pool; 0 is none.
    disk_bytes_per_s: float = 0.0  # What its disk may be read with at the most, where that is limited.
    keeps_sparse: bool = False  # What its disk holds of KV can be read in part (``shared.messages.sparse_reads``).
    shares: str = ""  # By which engine storages of other nodes can read its host pool; "" is not at all.
    disk_measured_bytes_per_s: float = 0.0  # What its disk was read with when it was measured; 0 is not known.
    shapes: bytes = (
        b""  # Of the chunks that its disk holds: digests of their geometries, 8 bytes each, most chunks first.
    )
    handover_bytes: int = (
        0  # Of its host memory that other nodes may copy when its node drains, at the most; 0 is none.
    )
    takes_compact: bool = False  # It reads compact forms of saves (``shared.compact_messages``).


class StorageDraining(Message, frozen=True):
    """A storage was asked to end, and waits for ``grace_ms`` at the most.

    Answered by ``ReleaseStorage`` once other nodes have copied what they are to have of its host memory, or when that
    time is over.
    """

    storage_id: str
    incarnation: str
    grace_ms: int


class StorageLeft(Message, frozen=True):
    """Graceful end."""

    storage_id: str
    incarnation: str


class HostPoolCreated(Message, frozen=True):
    """Answer to ``CreateHostPool``. ``handle`` is None and ``error`` says why when it could not be made."""

    storage_id: str
    incarnation: str
    handle: PoolHandle | None
    error: str = ""
    form: ChunkForm = "kv"


class BackupDone(Message, frozen=True):
    """Answer to ``BackupPages``. When not ``ok`` none of its host pages may be used."""

    storage_id: str
    incarnation: str
    transfer_id: int
    ok: bool
    error: str = ""
    seconds: float = 0.0


class ChunksListed(Message, frozen=True):
    """Chunks (16 bytes each) that the disk holds already, in pieces of at most ``LISTED_AT_ONCE``.

    Form ``sparse`` is listed whenever such copies were made, some time after their chunks of KV were saved.
    """

    storage_id: str
    incarnation: str
    chunks: bytes
    form: ChunkForm = "kv"


class ChunksSaved(Message, frozen=True):
    """Answer to ``SaveChunks``. ``chunks`` (16 bytes each) are durable on the disk now, whichever storage wrote them.

    A chunk that went to the object store only is not among them. ``dropped`` are chunks of the same form that had to
    make room; those of the other form are in a ``ChunksDropped``. A ``SaveTokens`` may be answered by ``is_all`` in
    the place of the names of all its chunks.
    """

    storage_id: str
    incarnation: str
    save_id: int
    chunks: bytes = b""
    dropped: bytes = b""
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    is_all: bool = False


class ChunksFetched(Message, frozen=True):
    """How far a ``FetchChunks`` is: its first ``chunks`` chunks are in host memory, sealed.

    Sent a few times on the way and once, with ``is_over``, at the end: nothing of it is written any more then.
    ``missing`` (16 bytes each) turned out not to be on the disk, or failed verification there.
    """

    storage_id: str
    incarnation: str
    fetch_id: int
    chunks: int
    is_over: bool
    disk_chunks: int = 0  # Of ``chunks``: read from the disk,
    remote_chunks: int = 0  # from the object store.
    missing: bytes = b""
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    lent_chunks: int = 0  # Of ``chunks``: read from another node's host memory.


class ChunksDropped(Message, frozen=True):
    """Chunks (16 bytes each) that the disk holds no more: deleted, evicted or quarantined."""

    storage_id: str
    incarnation: str
    chunks: bytes
    form: ChunkForm = "kv"


StorageEvent = (
    StorageJoined
    | StorageLeft
    | HostPoolCreated
    | BackupDone
    | ChunksListed
    | ChunksSaved
    | ChunksFetched
    | ChunksDropped
    | StorageDraining
)
"""What storages put into the stream."""
