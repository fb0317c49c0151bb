"""Settings of the scheduler process. Those that shape decisions travel to the core as ``CellConfig``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.broker import BrokerSettings
from shared.bus.protocol import StreamLimits
from shared.messages.cell_events import CellConfig
from shared.messages.pools import form_word
from shared.tracing import Traces

_CELL = CellConfig()

Kind = Literal["policy", "schedule", "admission"]
KINDS: tuple[Kind, ...] = ("policy", "schedule", "admission")
"""Settings that may name a class from outside, see ``outside.py``."""


class SchedulerConfig(BrokerSettings, frozen=True, kw_only=True):
    """Flags, environment and file of ``thermocline scheduler``."""

    id: Annotated[str, Meta(description="name of this process")] = "scheduler"
    metrics_port: Annotated[int, Meta(description="serve /metrics on this port; 0 is off", ge=0)] = 0
    metrics_host: Annotated[str, Meta(description="address on which /metrics is served there")] = "127.0.0.1"
    traces: Traces = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe event that is logged")
    ] = "info"

    prefix_caching: Annotated[
        bool, Meta(description="keep KV for later requests and reuse it; false computes every prompt whole")
    ] = _CELL.prefix_caching
    policy: Annotated[str, Meta(description="eviction policy: a name, or module:Class of your own")] = _CELL.policy
    eviction_expression: Annotated[
        str, Meta(description="priority of policy hotprefix, x op y op z over clock, frequency and length")
    ] = _CELL.eviction_expression
    hotness_expression: Annotated[str, Meta(description="hotness for admission and promotion, of the same form")] = (
        _CELL.hotness_expression
    )
    fingerprint_bits: Annotated[int, Meta(description="hotness filter: bits of a fingerprint", ge=4, le=32)] = (
        _CELL.fingerprint_bits
    )
    clock_bits: Annotated[int, Meta(description="hotness filter: bits of a clock", ge=2, le=16)] = _CELL.clock_bits
    frequency_bits: Annotated[int, Meta(description="hotness filter: bits of a frequency", ge=2, le=32)] = (
        _CELL.frequency_bits
    )
    depth_bits: Annotated[int, Meta(description="hotness filter: bits of a depth", ge=2, le=32)] = _CELL.depth_bits
    aging_requests: Annotated[int, Meta(description="requests after which every clock goes down by one", ge=1)] = (
        _CELL.aging_requests
    )
    admission: Annotated[
        str,
        Meta(description="evicted KV that is backed up to host memory: all, selective, none, or module:Class"),
    ] = _CELL.admission
    admission_frequency: Annotated[int, Meta(description="least frequency that selective admission takes", ge=0)] = (
        _CELL.admission_frequency
    )
    promotion: Annotated[
        Literal["off", "hotness", "recency", "frequency", "depth"],
        Meta(description="what is promoted from host to device memory while requests decode"),
    ] = _CELL.promotion
    promotion_tokens: Annotated[int, Meta(description="most that one promotion moves; 0 is no bound", ge=0)] = (
        _CELL.promotion_tokens
    )
    schedule: Annotated[
        str,
        Meta(description="order in which waiting requests are admitted: balanced, lpm, fcfs, or module:Class"),
    ] = _CELL.schedule
    defer_tokens: Annotated[
        int, Meta(description="a request waits for more tokens than this that another computes; 0 never waits", ge=0)
    ] = _CELL.defer_tokens
    defer_deadline_ms: Annotated[int, Meta(description="longest such wait", ge=1)] = _CELL.defer_deadline_ms
    load_compute_ratio: Annotated[
        float, Meta(description="loaded tokens per computed token of a loading-bound batch; 0 measures it", ge=0)
    ] = _CELL.load_compute_ratio
    bubble_filling: Annotated[bool, Meta(description="decode while a loading-bound batch loads")] = _CELL.bubble_filling
    bubble_prefill: Annotated[bool, Meta(description="also prefill prompts that need no load meanwhile")] = (
        _CELL.bubble_prefill
    )
    fair_share: Annotated[bool, Meta(description="tenants of equal priority take turns")] = _CELL.fair_share
    queue_window: Annotated[int, Meta(description="waiting requests a batch looks at", ge=1)] = _CELL.queue_window
    max_queued_per_tenant: Annotated[int, Meta(description="waiting requests of one tenant; 0 is no bound", ge=0)] = (
        _CELL.max_queued_per_tenant
    )
    max_batch_tokens: Annotated[
        int, Meta(description="prefill tokens of one batch; 0: by the GPU's memory, 2048 on a CPU", ge=0)
    ] = 0
    max_running: Annotated[
        int, Meta(description="requests that a worker runs at once; 0: by the pool of the device", ge=0)
    ] = 0
    max_queued: Annotated[int, Meta(description="waiting requests; one more is refused", ge=1)] = _CELL.max_queued
    max_queued_tokens: Annotated[int, Meta(description="prompt tokens of waiting requests", ge=1)] = (
        _CELL.max_queued_tokens
    )
    batches_ahead: Annotated[int, Meta(description="batches sent before the first is answered", ge=1)] = (
        _CELL.batches_ahead
    )
    lease_tokens: Annotated[
        int,
        Meta(description="least decode room granted at a time; longer answers get more where the pool has room", ge=1),
    ] = _CELL.lease_tokens
    reserve_fraction: Annotated[float, Meta(description="device pages kept free", ge=0, lt=1)] = _CELL.reserve_fraction
    host_tier: Annotated[bool, Meta(description="keep evicted KV in host memory")] = _CELL.host_tier
    min_host_load_tokens: Annotated[int, Meta(description="a shorter host hit is recomputed", ge=1)] = (
        _CELL.min_host_load_tokens
    )
    backup_deadline_ms: Annotated[int, Meta(description="time after which a backup counts as failed", ge=1)] = (
        _CELL.backup_deadline_ms
    )
    host_writes: Annotated[
        Literal["through", "selective", "on_evict"],
        Meta(description="when KV is copied to host memory: once computed, once reused, or at eviction"),
    ] = _CELL.host_writes
    copies_at_rest: Annotated[
        bool, Meta(description="copy KV that only an idle worker's device holds to free pages of host memory")
    ] = _CELL.copies_at_rest
    disk_writes: Annotated[
        Literal["through", "selective", "on_evict", "off"],
        Meta(description="when KV goes to disk or object store: once computed, once reused, or leaving host memory"),
    ] = _CELL.disk_writes
    save_deadline_ms: Annotated[int, Meta(description="time after which a save to disk counts as failed", ge=1)] = (
        _CELL.save_deadline_ms
    )
    prefetch_wait: Annotated[
        Literal["best_effort", "deadline", "full"],
        Meta(description="how long a request waits for its prefix from disk: until it could run, a time, or the end"),
    ] = _CELL.prefetch_wait
    prefetch_deadline_ms: Annotated[int, Meta(description="longest such wait under deadline", ge=1)] = (
        _CELL.prefetch_deadline_ms
    )
    fetch_deadline_ms: Annotated[int, Meta(description="time after which a fetch from disk is cut off", ge=1)] = (
        _CELL.fetch_deadline_ms
    )
    min_prefetch_tokens: Annotated[int, Meta(description="a shorter hit on disk is recomputed", ge=1)] = (
        _CELL.min_prefetch_tokens
    )
    prefetch_fraction: Annotated[float, Meta(description="host pages that fetches may fill at once", gt=0, le=1)] = (
        _CELL.prefetch_fraction
    )
    neighbour_loads: Annotated[bool, Meta(description="copy prefixes from other devices of the node")] = (
        _CELL.neighbour_loads
    )
    hidden_form: Annotated[
        str,
        Meta(
            description="what is kept below host memory in the place of KV: off, auto (KV beside sparse copies), or "
            "numbers of layers absent, from hidden states and as KV, as 8/24/0"
        ),
    ] = _CELL.hidden_form
    restoring: Annotated[
        Literal["planned", "kv", "hidden", "recompute", "important"],
        Meta(description="how a prefix comes back from below host memory: by cost, or always by one means"),
    ] = "planned"
    importance_caching: Annotated[
        bool, Meta(description="weigh KV that is read in part by its measured importance, and bring it up when hot")
    ] = _CELL.importance_caching
    pin_fraction: Annotated[float, Meta(description="host pages that pins may hold", ge=0, le=1)] = _CELL.pin_fraction
    max_attempts: Annotated[int, Meta(description="starts of one request before it fails", ge=1)] = _CELL.max_attempts

    heartbeat_lost_ms: Annotated[int, Meta(description="silence after which a process counts as dead", ge=1000)] = 5000
    lead_ms: Annotated[
        int, Meta(description="silence of the active scheduler after which a standby takes over", ge=100)
    ] = 700
    snapshot_every_inputs: Annotated[int, Meta(description="inputs between snapshots", ge=1)] = 20_000
    snapshot_every_ms: Annotated[int, Meta(description="time between snapshots while inputs come", ge=100)] = 30_000
    check_invariants_every: Annotated[int, Meta(description="inputs between checks; 0 is off", ge=0)] = 0
    stream_max_bytes: Annotated[
        int, Meta(description="size of each stream; less than it holds is not applied", ge=2**20)
    ] = 2 * 1024**3
    stream_max_age_s: Annotated[float, Meta(description="age of the oldest stream message", gt=0)] = 24 * 3600.0
    stream_replicas: Annotated[int, Meta(description="copies of each stream in a NATS cluster", ge=1, le=5)] = 1
    responses_max_age_s: Annotated[
        float,
        Meta(description="how long answers of /v1/responses are kept, for later ones to continue", gt=0),
    ] = 24 * 3600.0
    responses_max_bytes: Annotated[
        int, Meta(description="most bytes of kept answers; beyond it the oldest are dropped", ge=2**20)
    ] = 256 * 2**20
    responses_max_count: Annotated[
        int, Meta(description="number of all that are kept; beyond it the oldest go", ge=1)
    ] = 100_000

    def cell_config(self) -> CellConfig:
        """Return the part that the core folds. A class given as ``module:Class`` is loaded, and named by its name.

        Raises ConfigError where it cannot be loaded.
        """
        told = {name: getattr(self, name) for name in CellConfig.__struct_fields__}
        for kind in KINDS:
            if ":" in told[kind]:
                from services.scheduler.outside import name_of

                told[kind] = name_of(kind, told[kind])
        return CellConfig(**told | {"restoring": form_word(self.restoring)})

    def stream_limits(self) -> StreamLimits:
        """Return the bounds of the streams, which are applied to existing streams too."""
        return StreamLimits(
            max_bytes=self.stream_max_bytes,
            max_age_s=self.stream_max_age_s,
            replicas=self.stream_replicas,
            kept_entries=self.responses_max_count,
            kept_bytes=self.responses_max_bytes,
            kept_age_s=self.responses_max_age_s,
        )
