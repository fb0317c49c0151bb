"""Inputs from the scheduler's own shell and from operators. Subject family ``in.cell``."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from shared.messages.base import Message

Promotion = Literal["off", "hotness", "recency", "frequency", "depth"]
HostWrites = Literal["through", "selective", "on_evict"]
DiskWrites = Literal["through", "selective", "on_evict", "off"]
Restoring = Literal["planned", "kv", "state", "recompute", "important"]
PrefetchWait = Literal["best_effort", "deadline", "full"]


class CellConfig(Message, frozen=True):
    """All settings that decisions depend on. They are an input, so a recording carries them."""

    prefix_caching: bool = True  # Requests reuse KV of earlier ones and leave theirs; without it, neither.
    policy: str = "thermocline"  # Eviction policy.
    eviction_expression: str = "frequency + clock / length"  # Priority of policy "hotprefix"; the least goes first.
    hotness_expression: str = "frequency * clock"  # Hotness for admission and promotion.
    fingerprint_bits: int = 8  # Widths of the fields of an entry in the hotness filter, in bits.
    clock_bits: int = 8
    frequency_bits: int = 8
    depth_bits: int = 8
    aging_requests: int = 64  # Admitted requests after which every clock goes down by one.
    admission: str = "all"  # Nodes that an eviction backs up; "selective" decides by hotness.
    admission_frequency: int = 2  # Least frequency that selective admission lets through.
    promotion: Promotion = "off"  # The order in which host copies are promoted after a prefill batch.
    promotion_tokens: int = 8192  # Most that one promotion plan moves; 0 is no bound.
    schedule: str = "balanced"  # Schedule: how a batch is chosen from a worker's queue.
    defer_tokens: int = 100  # More tokens than this that another request is about to compute defer one; 0 never does.
    defer_deadline_ms: int = 30_000  # Past it a deferred request runs anyway.
    load_compute_ratio: float = 0.0  # Loaded tokens per computed token that make a batch loading-bound; 0 measures.
    bubble_filling: bool = True  # Decode while a loading-bound batch loads.
    bubble_prefill: bool = False  # Also prefill meanwhile, where that needs no load.
    fair_share: bool = True  # Tenants of equal priority take turns, by tokens served.
    queue_window: int = 128  # Waiting requests of a worker that are scanned for one batch.
    max_queued_per_tenant: int = 0  # Waiting requests of one tenant; 0 is no bound of its own.
    max_batch_tokens: int = 2048  # Prefill tokens of one batch (chunked prefill budget); 0 leaves it to the device.
    max_running: int = 64  # Requests that a worker decodes or prefills at once; 0 leaves it to the device.
    max_queued: int = 4096  # Waiting requests of the cell; one more is refused.
    max_queued_tokens: int = 16_777_216
    batches_ahead: int = 2  # RunBatch plans sent before the first is answered.
    lease_tokens: int = 64  # Least decode room granted at a time; where the pool has room, more for longer answers.
    reserve_fraction: float = 0.05  # Share of device pages that eviction tries to keep free ahead of need.
    host_tier: bool = True  # Back up to host memory on eviction, and load on a hit.
    min_host_load_tokens: int = 1  # A shorter host hit is recomputed.
    backup_deadline_ms: int = 10_000  # Past it a backup counts as failed.
    host_writes: HostWrites = (
        "on_evict"  # When KV is copied to host memory: at once, once it was reused, or at eviction.
    )
    copies_at_rest: bool = False  # Copy KV that only an idle worker's device holds to free host pages.
    disk_writes: DiskWrites = "through"  # The same for disk and object store; "on_evict": when KV leaves host memory.
    save_deadline_ms: int = 30_000  # Past it a save to disk counts as failed.
    prefetch_wait: PrefetchWait = "deadline"  # How a request waits for its prefix from disk or object store.
    prefetch_deadline_ms: int = 2_000  # Longest such wait under "deadline".
    fetch_deadline_ms: int = 30_000  # Past it a fetch is cut off, even if requests wait for it.
    min_prefetch_tokens: int = 64  # A shorter hit below host memory is recomputed.
    prefetch_fraction: float = 0.5  # Share of host pages that fetches in flight may fill at most.
    neighbour_loads: bool = True  # Copy a prefix from another device of the node rather than recompute it.
    # Form kept below host memory in the place of KV: "off", "auto", or numbers of layers as "T/H/K".
    hidden_form: str = field(name="state_form", default="auto")
    restoring: Restoring = "planned"  # How a prefix is restored from below host memory.
    importance_caching: bool = True  # Measured importance weighs cached nodes, and hot chunks are warmed.
    pin_fraction: float = 0.25  # Share of host pages that pins and leases may lock at most.
    max_attempts: int = 4  # Starts of one request before it fails.


class CellConfigured(Message, frozen=True):
    """The cell's settings: sent before any decision depends on them, and after each change."""

    config: CellConfig


class SchedulerStarted(Message, frozen=True):
    """A scheduler took over with this fencing epoch; outputs from now on carry it."""

    scheduler_id: str
    epoch: int


class TimerFired(Message, frozen=True):
    """A timer that the core had set came due."""

    timer_id: str


class WorkerLost(Message, frozen=True):
    """Heartbeats of this incarnation stopped, or its process was seen to end; ``reason`` says which."""

    worker_id: str
    incarnation: str
    reason: str = "heartbeat_lost"


class StorageLost(Message, frozen=True):
    """Heartbeats of this incarnation stopped, or its process was seen to end; ``reason`` says which."""

    storage_id: str
    incarnation: str
    reason: str = "heartbeat_lost"


class GatewayLost(Message, frozen=True):
    """A gateway died; its requests are cancelled."""

    gateway_id: str
    reason: str = "heartbeat_lost"


class FlushCache(Message, frozen=True):
    """Drop every cached node that nothing uses. ``tiers`` names some of ``device``, ``host``, ``disk``, ``remote``."""

    call_id: str
    tiers: tuple[str, ...] = ("device", "host")
    namespace: str = ""  # "" is all of them.


class InputFailed(Message, frozen=True):
    """The core raised for input ``seq`` at the active scheduler. After several of these the input is skipped."""

    seq: int
    scheduler_id: str
    error: str  # For people.


class SkipInput(Message, frozen=True):
    """An operator's order to leave input ``seq`` out, if no scheduler has folded it yet."""

    seq: int
    reason: str


class InputSkipped(Message, frozen=True):
    """Input ``seq``, which came before this one, is left out of the fold by all schedulers.

    Its kind and the processes that it concerned, as far as they could be read, are here because it is not read again.
    """

    seq: int
    subject: str  # Subject on which it was stored.
    kind: str  # Its type; "" if unknown.
    reason: str  # For people.
    gateway_id: str = ""  # Gateway and request of a request's input,
    request_id: str = ""
    worker_id: str = ""  # or the process that reported by it,
    storage_id: str = ""
    incarnation: str = ""
    timer_id: str = ""  # or the timer that fired.


class PinPrefix(Message, frozen=True):
    """Keep the cached prefix of ``tokens`` (packed int32) in host memory and on disk until ``ttl_ms`` from now.

    A pin holds whole pages that are cached then; a repeated ``pin_id`` renews it. It is refused beyond its budget.
    """

    pin_id: str
    namespace: str
    tokens: bytes
    ttl_ms: int


class UnpinPrefix(Message, frozen=True):
    """End a pin before its time; an unknown one is ignored."""

    pin_id: str


class LoadAdapter(Message, frozen=True):
    """Have every worker load the LoRA adapter in a directory, and serve it under this name from now on.

    An adapter that had the name before loses it: at once, or with ``expects`` when every worker has loaded the other.
    ``digest`` is that of the files (``shared.adapters``).
    """

    name: str
    path: str  # Absolute; on every node that has workers.
    digest: str
    expects: str | None = None  # Digest that the name has now, "" for none; the order is refused if it has another.


class UnloadAdapter(Message, frozen=True):
    """Take no more requests for the adapter of this name; running ones go on. An unknown name is ignored.

    With a ``digest``, only if the name has that adapter; where that is only to get the name, it gets it no more.
    """

    name: str
    digest: str = ""


CellEvent = (
    CellConfigured
    | SchedulerStarted
    | TimerFired
    | WorkerLost
    | StorageLost
    | GatewayLost
    | InputFailed
    | SkipInput
    | InputSkipped
    | FlushCache
    | PinPrefix
    | UnpinPrefix
    | LoadAdapter
    | UnloadAdapter
)
"""Events that schedulers, operators and the cell's settings put into the stream."""
