"""Heartbeats, the cell's status, and request/reply calls; none of them is an input of the core."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from shared.messages.base import Message
from shared.messages.tokens import TokenItem
from shared.messages.worker_events import DeviceFacts, KernelFacts

Kind = Literal["gateway", "scheduler", "worker", "storage"]


OWNERS_TOLD = 1024
"""Owners, and tenants, that a message lists at most: those with most."""


class Degradation(Message, frozen=True):
    """Something that a process was asked for and does not have now (see ``shared.degradations``)."""

    component: str  # Id of the process that lacks it.
    what: str  # One word or two: disk, quota, remote, host pool, ...
    reason: str  # For people.
    setting: str = ""  # The flag that asked for it, such as "--disk-dir".


class Heartbeat(Message, frozen=True):
    """Published by every process about once a second on ``heartbeat.<kind>.<id>``.

    With ``is_gone`` it comes from a storage, on the storage's subject: this incarnation on its node has ended.
    """

    kind: Kind
    id: str
    incarnation: str
    last_plan: int = 0  # Highest plan number executed.
    is_gone: bool = False
    owned_bytes: dict[str, int] = {}  # For a storage with a disk: bytes there by owner, see ``OwnerBytes``.
    degraded: tuple[Degradation, ...] = ()  # Requested features that this process does not have now.


class PoolStatus(Message, frozen=True):
    """Pages of one pool; free + cached + leased = total, and all leased are back at idle."""

    owner: str  # worker id or storage id
    tier: Literal["device", "host", "state"]  # HIDDEN: host memory for hidden states in transit to and from the disk.
    total: int
    free: int
    cached: int
    leased: int
    form: str = ""  # KvGeometry.form of a hidden pool.


class WorkerStatus(Message, frozen=True):
    """One worker of the cell, with its running and waiting requests."""

    worker_id: str
    incarnation: str
    running: int
    waiting: int
    draining: bool = False  # It gets nothing new and is about to leave.
    device: DeviceFacts | None = None  # As reported when it joined.


class RestorationStatus(Message, frozen=True):
    """Durations of restorations from below host memory by one method, with the predicted ones."""

    kind: str  # Methods and sources, such as "hidden from disk + tokens".
    count: int
    predicted_seconds: float  # Sums over all restorations.
    observed_seconds: float
    bias: float  # Smoothed (observed - predicted) / predicted.
    error: float  # The same without its sign.


class TenantLoad(Message, frozen=True):
    """Requests of one tenant, by the name that they carry; "" is requests without a key."""

    tenant: str
    running: int
    waiting: int


class OwnerBytes(Message, frozen=True):
    """Cached bytes of one owner (``CacheQuota.owner``) in all pools of a tier together; "" is all the rest."""

    owner: str
    device: int = 0
    host: int = 0
    disk: int = 0


class StorageBudget(Message, frozen=True):
    """Bytes that a storage may hold; 0 is none. ``awaits_pool``: its host pool is being made."""

    storage_id: str
    host: int = 0
    awaits_pool: bool = False
    disk: int = 0
    has_remote: bool = False


class AdapterReplacement(Message, frozen=True):
    """A LoRA adapter that gets the name of another once every worker has it, or that did not because of ``faults``."""

    digest: str
    workers: tuple[str, ...] = ()
    faults: dict[str, str] = {}
    room_waits: dict[str, str] = {}


class AdapterStatus(Message, frozen=True):
    """A LoRA adapter that callers may ask for by ``name``."""

    name: str
    digest: str
    path: str
    workers: tuple[str, ...] = ()  # Workers that have loaded it.
    faults: dict[str, str] = {}  # Workers that could not load it, and why; others still load.
    requests: int = 0  # Waiting or running requests, under any of its names.
    room_waits: dict[str, str] = {}  # Workers that load it when an adapter without a name has left, and which that is.
    replacement: AdapterReplacement | None = None


class CellStatus(Message, frozen=True):
    """Published by the active scheduler twice a second on ``status``, and on request at ``rpc.scheduler.status``."""

    scheduler_id: str
    epoch: int
    seq: int  # Last input folded.
    model: str
    page_size: int
    queued: int
    running: int
    max_queued: int
    max_context: int
    workers: tuple[WorkerStatus, ...] = ()
    storages: tuple[str, ...] = ()
    storage_incarnations: dict[str, str] = {}  # By storage id.
    pools: tuple[PoolStatus, ...] = ()
    counters: dict[str, int] = {}  # Monotonic counters of the core, by name (hits, evictions, ...).
    nodes: int = 0
    pins: int = 0
    pinned_pages: int = 0  # Host pages.
    cache_leases: int = 0
    leased_pages: int = 0  # Pages that they cover, on any tier; each counts once.
    chunks: int = 0  # Chunks of KV on the disks, as far as the scheduler knows.
    hidden_chunks: int = field(name="state_chunks", default=0)  # The same of hidden states.
    sparse_chunks: int = 0  # Of ``chunks``: with a second copy for sparse reads.
    fetches: int = 0  # Fetches in flight.
    saves: int = 0  # Saves in flight.
    deferred: int = 0  # Waiting requests that wait for KV that another is about to bring.
    in_queue_nodes: int = 0  # Transient nodes whose producers all wait.
    in_flight_nodes: int = 0  # Transient nodes that an admitted request is computing.
    restorations: tuple[RestorationStatus, ...] = ()
    deferred_for_fetch: int = 0  # Of ``deferred``: waiting for a storage's fetch from below.
    unplaced: int = 0  # Of ``queued``: without a worker to wait at.
    tenant_loads: tuple[TenantLoad, ...] = ()  # Tenants with a request.
    owner_bytes: tuple[OwnerBytes, ...] = ()
    degraded: tuple[Degradation, ...] = ()  # Degradations of all processes, from their heartbeats.
    dtype: str = ""  # Data type of KV, as in its pages.
    page_bytes: int = 0  # Bytes of a page of KV; 0 while no worker has joined.
    budgets: tuple[StorageBudget, ...] = ()
    takes_bases: bool = False  # A ``SubmitRequest`` may refer to the front of its prompt.
    takes_compact: bool = False  # A ``SubmitRequest`` may have its tokens in compact form.
    adapters: tuple[AdapterStatus, ...] = ()
    kernels: KernelFacts | None = None  # Of the workers; None where they, or the scheduler, do not say.

    @property
    def chunks_in_all(self) -> int:
        """Number of chunks on the disks in either form."""
        return self.chunks + self.hidden_chunks


class GetStatus(Message, frozen=True):
    """Call ``rpc.scheduler.status``; answered by CellStatus."""


class GetOutputs(Message, frozen=True):
    """Call ``rpc.worker.<id>.outputs``: all output of this worker for a request from ``index`` on."""

    request_id: str
    attempt: int
    index: int


class Outputs(Message, frozen=True):
    """Answer to GetOutputs: the items joined into one, or None if the worker does not know the request any more."""

    item: TokenItem | None


class GetInventory(Message, frozen=True):
    """Call ``rpc.worker.<id>.inventory`` or ``rpc.storage.<id>.inventory``."""


class Inventory(Message, frozen=True):
    """Actual holdings of a worker or storage, for reconciliation and for tests."""

    id: str
    incarnation: str
    last_plan: int
    requests: tuple[str, ...] = ()
    pages_total: int = 0
    counters: dict[str, int] = {}  # e.g. prefill_tokens_computed, decode_tokens, pages_loaded, steps


class TakeSnapshot(Message, frozen=True):
    """Call ``rpc.scheduler.snapshot``: write a snapshot of the core now."""


class SnapshotTaken(Message, frozen=True):
    """Answer to TakeSnapshot: the snapshot holds all inputs up to ``seq``, in ``nbytes`` bytes."""

    seq: int
    nbytes: int


class GetStanding(Message, frozen=True):
    """Call ``rpc.scheduler.standing``: whether the cell counts this incarnation of a storage among its own."""

    storage_id: str
    incarnation: str


class Standing(Message, frozen=True):
    """Answer to GetStanding, true at some moment between call and answer. A lost member never is one again."""

    is_member: bool


class GetRequestStanding(Message, frozen=True):
    """Call ``rpc.scheduler.request``: whether the cell still has this request to answer."""

    request_id: str


class RequestStanding(Message, frozen=True):
    """Answer to GetRequestStanding, true at some moment between call and answer."""

    is_known: bool


class ListCache(Message, frozen=True):
    """Call ``rpc.scheduler.cache``: the radix tree, nodes in the order in which they were made, a page at a time.

    Answered by CacheListing.
    """

    namespace: str = ""  # "" is all of them.
    max_nodes: int = 256
    after: int = 0  # Continue after the node of this id.
    max_leases: int = 0  # Cache leases to list beside the nodes, the first granted first.


class CachedNode(Message, frozen=True):
    """One node, with its pages per pool; ``head`` is its first tokens (packed int32, at most 16)."""

    id: int
    parent: int
    namespace: str
    depth: int  # Tokens above its own span.
    tokens: int  # Tokens of its own span.
    hits: int
    head: bytes
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    disk: dict[str, int] = {}  # Chunks that end in this node's span and whose KV is on that storage's disk.
    hidden: dict[str, int] = field(name="state", default_factory=dict)  # The same in the form hidden.
    pins: tuple[str, ...] = ()


class PinStatus(Message, frozen=True):
    """One pin. ``pages`` are the host pages that it holds, of the first ``held_tokens`` of its tokens."""

    pin_id: str
    namespace: str
    tokens: int
    held_tokens: int
    pages: int
    expires_ns: int
    refusal: str = ""  # Why it holds nothing.


class LeaseStatus(Message, frozen=True):
    """One cache lease: its tenant keeps the first ``tokens`` of a prompt of the namespace."""

    tenant: str
    namespace: str
    key: str
    tokens: int  # 0 once all of it was lost.
    ttl_ms: int
    expires_ns: int


class CacheListing(Message, frozen=True):
    """Answer to ListCache. ``next_after`` is 0 at the end; before it, a page may have few nodes, or none."""

    nodes: tuple[CachedNode, ...] = ()
    pins: tuple[PinStatus, ...] = ()
    leases: tuple[LeaseStatus, ...] = ()
    next_after: int = 0


class VerifyChunks(Message, frozen=True):
    """Call ``rpc.storage.<id>.verify``: read chunks of the disk and check them; answered by ChunksVerified.

    A bad chunk is quarantined and reported to the scheduler. Ask again with ``after`` until ``next_after`` is "".
    """

    after: str = ""
    max_chunks: int = 256


class ChunksVerified(Message, frozen=True):
    """Answer to VerifyChunks."""

    checked: int
    nbytes: int
    bad: tuple[str, ...] = ()  # Hex digits of the chunks, with what was wrong.
    next_after: str = ""
