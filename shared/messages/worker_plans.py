"""Numbered, idempotent orders from the scheduler to one worker. Subject family ``out.worker.<id>``.

A worker executes plans of its own incarnation in order of number, each once; it drops numbers it has already
executed and fetches missing ones from ``TC_OUTPUTS``.
"""

from __future__ import annotations

from msgspec import field

from shared.compact_tokens import count_compact
from shared.messages.base import Message, count_int32
from shared.messages.pools import PoolHandle
from shared.messages.requests import Importance, SamplingParams


class HiddenLease(Message, frozen=True, tag="StateLease"):
    """Pages of the node's hidden pool (packed int32) for hidden states of one request's tokens (HCache 4.2.2).

    The worker fills and seals them as it computes tokens from ``depth`` on; ``depth`` is a multiple of a chunk's tokens
    and ``parent`` the identity of the page before it. Answered by one ``HiddenSaved``, whatever becomes of the request.
    """

    lease_id: int
    storage_id: str
    depth: int
    pages: bytes
    parent: bytes


class SparsePrefix(Message, frozen=True):
    """Tokens [start, end) of a request on its node's disk, only the important ones to be loaded (IMPRESS 4.1).

    In the step of the request's first chunk, each layer reads the keys of the probe heads, chooses tokens, and reads
    their K and V (``shared.messages.sparse_reads``); these tokens are never computed. ``start`` and ``end`` are
    multiples of the page size. ``chunks`` are the names (16 bytes each) of the chunks that hold them, the first of
    which begins at token ``depth``, at or before ``start``; the last ends at ``end``. ``pages`` (packed int32) hold in
    every layer what that layer chose, in order: room for ceil(ratio * (end - start)) tokens.
    """

    storage_id: str
    namespace: str
    start: int
    end: int
    depth: int
    chunks: bytes
    pages: bytes
    importance: Importance
    key_id: str = ""


class LeaseGrant(Message, frozen=True):
    """The answer to one ``Lease``: the tokens of the prompt that are kept and until when, or why none are.

    ``refusal`` is one of

    * ``malformed``: no whole page, or no time;
    * ``no_budget``: the tenant has none;
    * ``over_budget``: larger than what the budget can give;
    * ``no_host_pool``: no pool could keep copies of pages that leave a device;
    * ``over_capacity``: leases of all tenants have the whole share of the host pools;
    * ``too_many``: as many as may be, of the request or the cell.
    """

    tokens: int = 0
    expires_ns: int = 0  # Wall clock; each use defers it.
    refusal: str = ""  # "" is granted.


class TextBase(Message, frozen=True):
    """The part of an ``AdmitRequest`` that the worker keeps already.

    That is the first ``tokens`` tokens of the text with this number, and the first ``pages`` entries of its page table.
    """

    text: int
    tokens: int
    pages: int


class AdmitRequest(Message, frozen=True):
    """Make a request known to the worker. It computes nothing until a ``RunBatch`` names it.

    ``tokens`` (packed int32) is the prompt followed by output tokens of earlier attempts; the first
    ``prompt_tokens`` of them are the caller's prompt. ``pages`` (packed int32) is the page table: entry i
    holds tokens [i * page_size, (i + 1) * page_size). It covers ``tokens`` and some decode room (the lease).
    The KV of the first ``cached_tokens`` tokens is in those pages already, or will be put there by loads of
    the first ``RunBatch`` that names this request. The worker samples output token number
    ``len(tokens) - prompt_tokens`` first.

    With a ``sparse`` prefix, entries of ``pages`` that hold its tokens are -1, and ``cached_tokens`` is its end: tokens
    before its start are cached like any other prefix. All KV computed behind it is lossy as well.

    To a worker that keeps texts (``WorkerJoined.kept_tokens``), ``tokens`` and ``pages`` follow behind ``base``.
    It keeps the whole of both under the number ``text``, unless that is 0, and then drops the numbers in
    ``dropped``, whether it knows them or not. It answers ``TextMissing`` where it does not keep the text of ``base``.

    To one that takes compact forms (``WorkerJoined.takes_compact``), ``compact`` may stand for ``tokens`` and
    ``page_runs`` for ``pages``, which are empty then (``shared.compact_messages``).
    """

    request_id: str
    attempt: int
    gateway_id: str
    tokens: bytes
    prompt_tokens: int
    sampling: SamplingParams
    pages: bytes
    cached_tokens: int = 0  # Prefix whose KV is not recomputed now, on any tier.
    device_tokens: int = 0  # Of the caller's prompt, for usage: found in this worker's device pool.
    host_tokens: int = 0  # Of the caller's prompt, for usage: loaded from the host pool.
    disk_tokens: int = 0  # The same: fetched to the host pool from the disk for this request.
    remote_tokens: int = 0  # The same, from the object store.
    neighbour_tokens: int = 0  # The same: copied from another worker's device pool.
    received_ns: int = 0
    accepted_ns: int = 0  # Stream timestamp of SubmitRequest.
    hidden_lease: HiddenLease | None = field(name="state_lease", default=None)
    sparse: SparsePrefix | None = None
    trace: str = ""  # As in SubmitRequest.
    leases: tuple[LeaseGrant, ...] = ()  # For usage: one answer to each lease of the request.
    base: TextBase | None = None
    text: int = 0
    dropped: tuple[int, ...] = ()
    lent_tokens: int = 0  # For usage: fetched to the host pool from another node for this request.
    compact: bytes = b""
    page_runs: bytes = b""
    adapter: str = ""  # As in SubmitRequest; the worker has loaded it.

    @property
    def token_count(self) -> int:
        """Number of all tokens, in whichever form they come, those of the base included."""
        told = count_compact(self.compact) if self.compact else count_int32(self.tokens)
        return (0 if self.base is None else self.base.tokens) + told


class PrefillChunk(Message, frozen=True):
    """Compute the KV of tokens [start, end) of a request. If end is its last token, sample its next token."""

    request_id: str
    attempt: int
    start: int
    end: int


class RestoreChunk(Message, frozen=True):
    """Restore the KV of tokens [start, end) of a request from hidden pages: a chunk that need not be computed.

    ``start`` is where the request's KV ends so far; both are multiples of the page size. ``hidden_pages`` (packed
    int32, of the storage's hidden pool) and ``identities`` (16 bytes each) have an entry for each page. The first
    ``recomputed`` layers are computed from tokens, the others from the contents of the pages; every unit is verified
    before it is used.
    """

    request_id: str
    attempt: int
    start: int
    end: int
    storage_id: str
    hidden_pages: bytes = field(name="state_pages")
    identities: bytes
    recomputed: int = 0


class PageLoad(Message, frozen=True):
    """Copy host pages to device pages before attention reads them, checking identity and checksum.

    ``host_pages`` and ``device_pages`` are packed int32 of equal length; ``identities`` is 16 bytes a page. Where
    ``neighbour_id`` is not empty, ``host_pages`` are pages of that worker's device pool instead (``storage_id`` is ""),
    which are locked until the batch is answered; such pages have no checksums.
    """

    request_id: str
    attempt: int
    storage_id: str
    host_pages: bytes
    device_pages: bytes
    identities: bytes
    neighbour_id: str = ""
    neighbour_incarnation: str = ""


class RunBatch(Message, frozen=True):
    """One forward step: loads and restorations, then these chunks with one token of every decoding request.

    A request has a chunk or is restored, not both. Answered by ``BatchDone`` with this plan's number.
    """

    chunks: tuple[PrefillChunk, ...]
    loads: tuple[PageLoad, ...] = ()
    fill_bubble: bool = False  # Decode while the loads run, until the chunks can be computed without a stall.
    restores: tuple[RestoreChunk, ...] = ()
    bubble_prefill: bool = False  # In such a bubble, also compute batches behind this one that load nothing.


class PromotePages(Message, frozen=True):
    """Copy host pages to device pages ahead of demand, beside decoding; answered by ``PagesPromoted``.

    Nothing reads or writes these device pages until then. Lists are as in ``PageLoad``; every page is verified.
    """

    promotion_id: int
    storage_id: str
    host_pages: bytes
    device_pages: bytes
    identities: bytes


class ExtendLease(Message, frozen=True):
    """Append pages (packed int32) to a running request's page table, and to its hidden lease if it has one."""

    request_id: str
    attempt: int
    pages: bytes
    hidden_pages: bytes = field(name="state_pages", default=b"")


class PreemptRequest(Message, frozen=True):
    """Stop this request and forget it; its pages are reused after the answer, ``RequestPreempted``."""

    request_id: str
    attempt: int


class AbortRequest(Message, frozen=True):
    """End this request for the caller with finish reason ``reason``; answered by ``RequestFinished``.

    A request that the worker has finished already needs no answer: its RequestFinished is in transit.
    """

    request_id: str
    attempt: int
    reason: str


class AttachHostPool(Message, frozen=True):
    """Map a pool of this node's storage; orders may name it from now on.

    With a geometry of hidden pages it is the hidden pool, which the worker also writes to.
    """

    storage_id: str
    handle: PoolHandle


class DetachHostPool(Message, frozen=True):
    """Unmap the pools of a storage; no later order names them."""

    storage_id: str


class AttachNeighbour(Message, frozen=True):
    """Map the device pool of another worker of this node, read-only; loads may name it from now on."""

    worker_id: str
    worker_incarnation: str
    handle: PoolHandle


class DetachNeighbour(Message, frozen=True):
    """Unmap a neighbour's device pool; no later load names it."""

    worker_id: str
    worker_incarnation: str


class AttachAdapter(Message, frozen=True):
    """Load a LoRA adapter beside the model, from a directory of this node; answered by ``AdapterAttached``.

    Its files must have this ``digest`` (``shared.adapters``): the directory may hold another adapter by now.
    """

    attach_id: int
    digest: str
    path: str
    replaces: str = ""  # Digest of an adapter that leaves once this one is loaded: it counts in no number of adapters.


class DetachAdapter(Message, frozen=True):
    """Drop a LoRA adapter; no running request has it. One that is still being loaded needs no answer any more."""

    digest: str


class LeaveCell(Message, frozen=True):
    """Answer to ``WorkerDraining``: the worker reports that it left, and ends. Its running requests go on elsewhere."""


class Dismiss(Message, frozen=True):
    """The worker cannot serve in this cell (other model, geometry or page size); it exits with this reason."""

    reason: str


WorkerOrder = (
    AdmitRequest
    | RunBatch
    | PromotePages
    | ExtendLease
    | PreemptRequest
    | AbortRequest
    | AttachHostPool
    | DetachHostPool
    | AttachNeighbour
    | DetachNeighbour
    | LeaveCell
    | Dismiss
    | AttachAdapter
    | DetachAdapter
)


class WorkerPlan(Message, frozen=True):
    """Envelope of an order. ``number`` counts from 1 for each (worker_id, incarnation)."""

    worker_id: str
    incarnation: str
    number: int
    epoch: int  # Fencing epoch of the scheduler that sent it.
    cause: int  # Stream sequence of the input that caused it.
    order: WorkerOrder
