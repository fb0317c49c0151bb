"""Storages' events for the scheduler. Subject family ``in.storage.<id>``."""

from __future__ import annotations

from msgspec import field

from shared.messages.base import Message
from shared.messages.pools import ChunkForm, PoolHandle

LISTED_AT_ONCE = 4096
"""Chunks that one ``ChunksListed`` names at most."""


class StorageJoined(Message, frozen=True):
    """A storage is ready, with this many bytes for host KV. Its pools are empty.

    Chunks of the cell's geometry on its disk follow in ``ChunksListed`` after ``HostPoolCreated``, of either form.
    """

    storage_id: str
    incarnation: str
    node: str
    host_bytes: int
    disk_bytes: int = 0  # Budget of the disk tier; 0 is none.
    has_remote: bool = False  # It has an object store, which may hold chunks of others.
    hidden_bytes: int = field(name="state_bytes", default=0)  # Budget of a hidden pool; 0 is none.
    disk_bytes_per_s: float = 0.0  # Limit of reads from its disk; 0: no limit.
    keeps_sparse: bool = False  # Its disk allows sparse reads of KV (``shared.messages.sparse_reads``).
    shares: str = ""  # Engine by which other nodes' storages can read its host pool; "" is none.
    disk_measured_bytes_per_s: float = 0.0  # Measured speed of reads; 0 is not known.
    shapes: bytes = b""  # Digests of the geometries of chunks on its disk, 8 bytes each, most chunks first.
    handover_bytes: int = 0  # Bytes of host memory at most that other nodes may copy when its node drains.
    takes_compact: bool = False  # It reads compact forms of saves (``shared.compact_messages``).


class StorageDraining(Message, frozen=True):
    """A storage was asked to end, and waits for ``grace_ms`` at most.

    Answered by ``ReleaseStorage`` once other nodes have copied their part of its host memory, or when that time is
    over.
    """

    storage_id: str
    incarnation: str
    grace_ms: int


class StorageLeft(Message, frozen=True):
    """Graceful end of a storage."""

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

    Form ``sparse`` is listed when such copies were made, some time after their chunks of KV were saved.
    """

    storage_id: str
    incarnation: str
    chunks: bytes
    form: ChunkForm = "kv"


class ChunksSaved(Message, frozen=True):
    """Answer to ``SaveChunks``. ``chunks`` (16 bytes each) are durable on the disk now, whichever storage wrote them.

    A chunk that went to the object store only is not among them. ``dropped`` are chunks of the same form that were
    evicted for them; those of the other form are in a ``ChunksDropped``. A ``SaveTokens`` may be answered by ``is_all``
    in the place of the names of all its chunks.
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
    """Progress of a ``FetchChunks``: its first ``chunks`` chunks are in host memory, sealed.

    Sent a few times and once, with ``is_over``, at the end: nothing of it is written any more then.
    ``missing`` (16 bytes each) turned out not to be on the disk, or failed verification there.
    """

    storage_id: str
    incarnation: str
    fetch_id: int
    chunks: int
    is_over: bool
    disk_chunks: int = 0  # Of ``chunks``: read from the disk.
    remote_chunks: int = 0  # Of ``chunks``: read from the object store.
    missing: bytes = b""
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    lent_chunks: int = 0  # Of ``chunks``: read from another node's host memory.


class ChunksDropped(Message, frozen=True):
    """Chunks (16 bytes each) that are not on the disk any more: deleted, evicted or quarantined."""

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
"""Events that storages put into the stream."""
