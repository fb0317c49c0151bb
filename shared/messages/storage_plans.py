"""Numbered, idempotent orders from the scheduler to one storage. Subject family ``out.storage.<id>``."""

from __future__ import annotations

from shared.messages.base import Message
from shared.messages.pools import ChunkForm, KvGeometry, PoolHandle


class CreateHostPool(Message, frozen=True):
    """Make the page-first host pool for this geometry, with as many pages as fit in the host KV budget.

    With a geometry of hidden pages it is the hidden pool: room for hidden states in transit to and from the disk, as
    many pages as fit in the storage's budget for them.
    """

    geometry: KvGeometry
    is_read_in_part: bool = True  # False: no worker reads parts of its chunks, so no copies are made for that.


class AttachDevicePool(Message, frozen=True):
    """Map a worker's device pool of this node."""

    worker_id: str
    worker_incarnation: str
    handle: PoolHandle


class DetachDevicePool(Message, frozen=True):
    """Unmap a worker's device pool. Backups of it that are still queued fail."""

    worker_id: str
    worker_incarnation: str


class BackupPages(Message, frozen=True):
    """Copy device pages to host pages and write identity and checksums; answered by ``BackupDone``.

    Both page lists are packed int32 of equal length; ``identities`` is 16 bytes for each page.
    """

    transfer_id: int
    worker_id: str
    worker_incarnation: str
    device_pages: bytes
    host_pages: bytes
    identities: bytes


class DiskQuota(Message, frozen=True):
    """Bytes that one owner may take on a disk, and in the object store, from now on; 0 is no bound.

    See ``CacheQuota``.
    """

    owner: str
    disk_bytes: int = 0
    remote_bytes: int = 0


class SaveChunks(Message, frozen=True):
    """Write a run of whole chunks of one sequence to the tiers below host memory; answered by ``ChunksSaved``.

    ``tokens`` (packed int32) are those of the run, the first of them ``depth`` tokens below the root; ``parent`` is the
    identity of the page before it. ``identities`` is 16 bytes a page. Page i is ``host_pages[i]`` of the storage's
    own pool or, where that is -1, ``device_pages[i]`` of the worker's (both packed int32, one entry a page). No process
    frees a device page before the answer. A host page may be given to a later order's data at once: orders take
    effect in order, so the storage reads it first.

    With form ``hidden``, all pages are of the hidden pool, and only this storage writes to them before the answer.
    """

    save_id: int
    namespace: str
    depth: int
    tokens: bytes
    parent: bytes
    identities: bytes
    host_pages: bytes
    device_pages: bytes
    worker_id: str = ""
    worker_incarnation: str = ""
    key_id: str = ""  # Key that encrypts it at rest; see ``SubmitRequest.key_id``.
    value: float = 0.0  # Present hotness; the disk evicts chunks of less value first.
    form: ChunkForm = "kv"
    quota: DiskQuota | None = None  # Quota of the namespace's owner; None changes nothing.


class SaveTokens(Message, frozen=True):
    """``SaveChunks`` in compact form, for storages that take it (``StorageJoined.takes_compact``).

    ``tokens`` are in the form of ``shared.compact_tokens``, both lists of pages in that of ``shared.page_runs``.
    Identities follow from ``parent`` and the tokens. Answered by ``ChunksSaved``, which may say ``is_all``.
    """

    save_id: int
    namespace: str
    depth: int
    tokens: bytes
    parent: bytes
    host_runs: bytes
    device_runs: bytes
    worker_id: str = ""
    worker_incarnation: str = ""
    key_id: str = ""
    value: float = 0.0
    form: ChunkForm = "kv"
    quota: DiskQuota | None = None


SaveOrder = SaveChunks | SaveTokens


class Lender(Message, frozen=True):
    """A storage of another node whose host pool holds the fetched pages: page i in ``pages[i]`` (packed int32).

    ``pages`` has one entry for each page of the fetch. The copies stay until the fetch is over.
    """

    storage_id: str
    incarnation: str
    pages: bytes


class FetchChunks(Message, frozen=True):
    """Bring a run of whole chunks of one sequence to host memory, in order; answered by ``ChunksFetched``.

    ``identities`` is 16 bytes a page; page i goes to ``host_pages[i]`` (packed int32), or nowhere where that is -1.
    Each tier is tried in turn, disk first, or only the ``lender``. The run ends at the first chunk that none of them
    has or that fails verification. With form ``hidden`` the pages are of the hidden pool.
    """

    fetch_id: int
    namespace: str
    depth: int
    identities: bytes
    host_pages: bytes
    deadline_ms: int
    key_id: str = ""
    form: ChunkForm = "kv"
    trace: str = ""  # ``traceparent`` of the request that it was begun for; "" is not traced.
    quota: DiskQuota | None = None  # As in ``SaveChunks``.
    lender: Lender | None = None


class CancelFetch(Message, frozen=True):
    """Start no further chunk of this fetch; its ``ChunksFetched`` reports the chunks that came."""

    fetch_id: int


class PinChunks(Message, frozen=True):
    """Never evict these chunks from the disk (16 bytes each, in either form), or allow it again.

    Pins do not outlive the incarnation.
    """

    chunks: bytes
    is_pinned: bool = True


class DropChunks(Message, frozen=True):
    """Delete chunks of a namespace ("" is all) from these tiers; each is reported in ``ChunksDropped``."""

    namespace: str = ""
    tiers: tuple[str, ...] = ("disk", "remote")


class ReleaseStorage(Message, frozen=True):
    """Answer to ``StorageDraining``: its host memory is not used any more, and it may end."""


StorageOrder = (
    CreateHostPool
    | AttachDevicePool
    | DetachDevicePool
    | BackupPages
    | SaveChunks
    | SaveTokens
    | FetchChunks
    | CancelFetch
    | PinChunks
    | DropChunks
    | ReleaseStorage
)


class StoragePlan(Message, frozen=True):
    """Envelope of an order. ``number`` counts from 1 for each (storage_id, incarnation)."""

    storage_id: str
    incarnation: str
    number: int
    epoch: int
    cause: int
    order: StorageOrder
