"""Workers' events for the scheduler. Subject family ``in.worker.<id>``; events are in the past tense."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message
from shared.messages.pools import PoolHandle

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class RestorationCosts(Message, frozen=True):
    """A worker's costs of restoring, by a profile of this model on this machine (HCache 4.1.2).

    Times are microseconds for one token in one layer.
    """

    hidden: int  # Values of a hidden state; 0 where the model's KV cannot be restored from hidden states.
    hidden_us: float  # Computing K and V from a hidden state.
    token_us: float  # Computing the whole layer without attention.
    pair_us: float  # Attending to one token of context.
    link_bytes_per_us: float  # Host memory to the device, verified.


class DeviceFacts(Message, frozen=True):
    """The devices that a worker computes on."""

    kind: Literal["cpu", "cuda"]
    name: str = ""  # Name by its maker or its driver.
    ranks: int = 1  # Processes that share the model, with a GPU each on cuda.
    note: str = ""  # Why an existing GPU is not used.
    max_batch_tokens: int = 0  # Its own bounds, where the cell's settings leave them to devices; 0: the usual ones.
    max_running: int = 0
    dtype: str = ""  # Type in which the model computes; "" where an earlier release does not say.


class KernelFacts(Message, frozen=True):
    """The kernels that a process computes KV with, or expects. They are part of the model's fingerprint."""

    files: str  # Fingerprint without the epoch: equal for one model whatever kernels compute it.
    epoch: int  # Of numerics (``shared.numerics``).
    release: str = ""


class WorkerJoined(Message, frozen=True):
    """A worker is ready. Sent once per incarnation; all its device pages are free."""

    worker_id: str
    incarnation: str
    node: str
    model: str  # Fingerprint of weights, config, tokenizer and the epoch of numerics.
    pool: PoolHandle
    max_context: int  # tokens
    restoration: RestorationCosts | None = None  # None where nothing was measured: then only KV is kept.
    device: DeviceFacts | None = None  # None where an earlier release does not say.
    kept_tokens: int = 0  # Tokens of kept texts together, which admissions may refer to; 0: none.
    takes_compact: bool = False  # It reads compact forms of admissions (``shared.compact_messages``).
    kernels: KernelFacts | None = None  # None where an earlier release does not say.
    reads_no_parts: str = ""  # Why it attends over no part of a prefix; "" where it does, or does not say.


class WorkerLeft(Message, frozen=True):
    """Graceful end: nothing of this incarnation runs any more."""

    worker_id: str
    incarnation: str


class WorkerDraining(Message, frozen=True):
    """The worker was asked to end. It goes on with its requests for ``grace_ms`` at most, and waits for LeaveCell.

    Answered by ``LeaveCell`` once nothing on its device is needed any more, or when that time is over.
    """

    worker_id: str
    incarnation: str
    grace_ms: int


class LoadFailure(Message, frozen=True):
    """Host pages (packed int32) whose identity or checksum was wrong when they were loaded."""

    storage_id: str
    host_pages: bytes
    reason: str
    neighbour_id: str = ""  # Set when they are pages of a neighbour's device pool.


class SparseLoaded(Message, frozen=True):
    """The sparse read of a request's ``SparsePrefix``, when its first chunk was computed.

    ``shares`` has a byte for each of its chunks: the share of the chunk's tokens that was chosen, on average over the
    layers, in 255ths (IMPRESS 4.4.2's importance ratio).
    """

    request_id: str
    attempt: int
    shares: bytes
    disk_bytes: int
    read_us: int  # Time for which computation waited for it.
    keys_us: int = -1  # Part of it in which computation waited for keys to choose by; -1: not told.


class BatchDone(Message, frozen=True):
    """A ``RunBatch`` was executed. Chunks of requests in ``failed`` were not computed; all others were.

    Requests in ``failed`` had a load that failed verification or a chunk that raised; the scheduler
    plans them again. A load whose request is in ``failed`` counts as undone as a whole, so every request of the
    batch that reuses any of its pages is in ``failed`` too. ``first_token_ns`` of the step is for metrics only.

    Time per prefill token is estimated as ``(compute_us - stall_us) / computed_tokens``: the bubble is not part of
    ``compute_us``, the stall is. Where ``load_failures`` or ``failed`` is not empty the step may have been repeated,
    and its time allows no such estimate. Do not add ``load_us`` and ``compute_us``: they overlap.
    """

    worker_id: str
    incarnation: str
    plan: int
    failed: tuple[str, ...] = ()  # request ids
    load_failures: tuple[LoadFailure, ...] = ()
    compute_us: int = 0  # Wall time of the step with the chunks, from the end of the bubble, stall included.
    load_us: int = 0  # Wall time from the first page load to the last, 0 without loads.
    loaded_tokens: int = 0  # Tokens of pages that were verified and written.
    computed_tokens: int = 0  # Prefill tokens of the step.
    bubble_us: int = 0  # Time in which decode steps ran while this batch was only loading.
    bubble_tokens: int = 0  # Tokens that these decode steps computed.
    stall_us: int = 0  # Time in which computation waited for a load; part of compute_us.
    restored_tokens: int = 0  # Tokens of ``restores`` that succeeded.
    restore_us: int = 0  # Wall time of all restorations, one after another, before the step; not in compute_us.
    restores_refused: tuple[str, ...] = ()  # Of ``failed``: their hidden pages were not what was saved.
    sparse_refused: tuple[str, ...] = ()  # Of ``failed``: their sparse prefix could not be read.
    sparse_loaded: tuple[SparseLoaded, ...] = ()


class HiddenSaved(Message, frozen=True, tag="StateSaved"):
    """Answer to a ``HiddenLease``: nothing writes to its pages any more, and the first ``chunks`` chunks are sealed.

    ``tokens`` (packed int32) are those of these chunks.
    """

    worker_id: str
    incarnation: str
    lease_id: int
    chunks: int = 0
    tokens: bytes = b""


class PagesPromoted(Message, frozen=True):
    """A ``PromotePages`` is over. It succeeded as a whole (``ok``), or its device pages are undefined.

    ``bad_host_pages`` (packed int32) failed verification.
    """

    worker_id: str
    incarnation: str
    promotion_id: int
    ok: bool
    bad_host_pages: bytes = b""
    load_us: int = 0


class LeaseWanted(Message, frozen=True):
    """One more request that wants decode room; fields as in ``LeaseRequested``."""

    request_id: str
    attempt: int
    generated: int


class LeaseRequested(Message, frozen=True):
    """A decoding request will run out of page room soon. ``generated`` counts its output tokens so far.

    ``others`` of the same worker would ask a little later: one message for all of them costs the scheduler less.
    """

    worker_id: str
    incarnation: str
    request_id: str
    attempt: int
    generated: int
    others: tuple[LeaseWanted, ...] = ()


class FinishedToo(Message, frozen=True):
    """One more request that is over; fields as in ``RequestFinished``."""

    request_id: str
    attempt: int
    reason: FinishReason
    output: bytes
    error: str = ""


class RequestFinished(Message, frozen=True):
    """A request is over at the worker. ``output`` holds all its output tokens of all attempts (packed int32).

    KV exists for the prompt and for all output tokens but the last. ``others`` ended with it, in the same step: one
    message for all of them costs all less, and their places are given to other requests together.
    """

    worker_id: str
    incarnation: str
    request_id: str
    attempt: int
    reason: FinishReason
    output: bytes
    error: str = ""
    others: tuple[FinishedToo, ...] = ()


class RequestPreempted(Message, frozen=True):
    """Answer to ``PreemptRequest``: the request is forgotten; ``output`` as in RequestFinished."""

    worker_id: str
    incarnation: str
    request_id: str
    attempt: int
    output: bytes


class TextMissing(Message, frozen=True):
    """A request was not admitted, because the worker does not keep the ``text`` that its ``AdmitRequest`` refers to."""

    worker_id: str
    incarnation: str
    request_id: str
    attempt: int
    text: int


class AdapterAttached(Message, frozen=True):
    """Answer to ``AttachAdapter``: requests may use the adapter now; with a ``fault``, why they may not."""

    worker_id: str
    incarnation: str
    attach_id: int
    digest: str
    fault: str = ""
    lacks_room: bool = False  # With a fault: it would be loaded if there were fewer others.


WorkerEvent = (
    WorkerJoined
    | WorkerDraining
    | WorkerLeft
    | BatchDone
    | LeaseRequested
    | RequestFinished
    | RequestPreempted
    | PagesPromoted
    | HiddenSaved
    | TextMissing
    | AdapterAttached
)
"""Events that workers put into the stream."""
