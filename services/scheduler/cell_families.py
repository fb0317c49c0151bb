"""Metric families made from the cell's status: name, meaning, labels, and where the status has their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from shared.messages.pools import form_name
from shared.messages.status import CellStatus, PoolStatus
from shared.metrics import MetricFacts, declare

Sample = tuple[tuple[str, ...], float]
"""(values of the labels, value of the metric)."""

Reading = Callable[[CellStatus], Iterable[Sample]]


def empty_family(facts: MetricFacts) -> Metric:
    """Return the family without samples."""
    kind = CounterMetricFamily if facts.kind == "counter" else GaugeMetricFamily
    return kind(facts.name, facts.documentation, labels=facts.labels)


def filled_family(facts: MetricFacts, samples: Iterable[Sample]) -> Metric:
    """Return the family with its samples."""
    family = empty_family(facts)
    assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


# -- gauges -----------------------------------------------------------------------------------------------------------


def _one(value: Callable[[CellStatus], float]) -> Reading:
    return lambda status: [((), value(status))]


def _waiting(status: CellStatus) -> list[Sample]:
    for_kv = status.deferred - status.deferred_for_fetch
    capacity = status.queued - status.deferred - status.unplaced
    return [
        (("capacity",), max(0, capacity)),
        (("deferral",), for_kv),
        (("fetch",), status.deferred_for_fetch),
        (("no_worker",), status.unplaced),
    ]


def _worker_requests(status: CellStatus) -> list[Sample]:
    return [
        ((worker.worker_id, state), count)
        for worker in status.workers
        for state, count in (("running", worker.running), ("waiting", worker.waiting))
    ]


def _pages(status: CellStatus) -> list[Sample]:
    return [
        ((pool.owner, form_name(pool.tier), state), count)
        for pool in status.pools
        for state, count in (("free", pool.free), ("cached", pool.cached), ("leased", pool.leased))
    ]


def _of_pools(value: Callable[[PoolStatus], float]) -> Reading:
    return lambda status: [((pool.owner, form_name(pool.tier)), value(pool)) for pool in status.pools if pool.total]


def _restorations(field: str) -> Reading:
    return lambda status: [((found.kind,), getattr(found, field)) for found in status.restorations]


GAUGES: tuple[tuple[str, str, tuple[str, ...], Reading], ...] = (
    ("queued_requests", "Waiting requests", (), _one(lambda status: status.queued)),
    ("deferred_requests", "Waiting requests deferred until KV is there", (), _one(lambda status: status.deferred)),
    ("running_requests", "Admitted requests", (), _one(lambda status: status.running)),
    ("num_requests_running", "The same as running_requests, under vLLM's name", (), _one(lambda s: s.running)),
    (
        "num_requests_waiting",
        "Waiting requests by what they wait for: capacity of a worker, KV that another request computes or loads "
        "(deferral), a fetch from disk or object store, or any worker at all",
        ("reason",),
        _waiting,
    ),
    ("tree_nodes", "Nodes of the prefix tree", (), _one(lambda status: status.nodes)),
    ("workers", "Joined workers", (), _one(lambda status: len(status.workers))),
    ("storages", "Joined storages", (), _one(lambda status: len(status.storages))),
    (
        "adapter_workers",
        "Workers that have a LoRA adapter, by its name",
        ("adapter",),
        lambda status: [((adapter.name,), len(adapter.workers)) for adapter in status.adapters],
    ),
    (
        "degraded",
        "Configured features that processes do not have now; /health/ready says why",
        ("component", "what"),
        lambda status: list(Counter((each.component, each.what) for each in status.degraded).items()),
    ),
    ("scheduler_epoch", "Fencing epoch", (), _one(lambda status: status.epoch)),
    ("scheduler_seq", "Last input folded", (), _one(lambda status: status.seq)),
    ("pins", "Pins that hold pages or chunks", (), _one(lambda status: status.pins)),
    ("pinned_pages", "Host pages that pins hold", (), _one(lambda status: status.pinned_pages)),
    ("cache_leases", "Cache leases in force", (), _one(lambda status: status.cache_leases)),
    (
        "cache_leased_tokens",
        "Tokens that cache leases cover, on any tier; each counts once",
        (),
        _one(lambda status: status.leased_pages * status.page_size),
    ),
    (
        "catalogue_chunks",
        "Chunks on disks that the scheduler knows of: KV, hidden states that it is restored from, and copies of KV for "
        "reads in part",
        ("form",),
        lambda status: [
            (("kv",), status.chunks),
            (("hidden",), status.hidden_chunks),
            (("sparse",), status.sparse_chunks),
        ],
    ),
    (
        "storage_orders",
        "Fetches and saves in flight, as the scheduler knows them",
        ("order",),
        lambda status: [(("fetch",), status.fetches), (("save",), status.saves)],
    ),
    (
        "transient_nodes",
        "Transient nodes by mark",
        ("mark",),
        lambda status: [(("in_queue",), status.in_queue_nodes), (("in_flight",), status.in_flight_nodes)],
    ),
    ("worker_requests", "Requests of a worker by state", ("worker", "state"), _worker_requests),
    (
        "draining",
        "1 for a worker that is about to leave",
        ("worker",),
        lambda status: [((worker.worker_id,), float(worker.draining)) for worker in status.workers],
    ),
    ("pool_pages", "Pages of a pool by use", ("owner", "tier", "state"), _pages),
    (
        "kv_cache_usage_perc",
        "Share of a pool's pages that running requests and transfers hold; 1 is all. Pages that are only cached can "
        "be evicted and count as free, as they do in vLLM",
        ("owner", "tier"),
        _of_pools(lambda pool: pool.leased / pool.total),
    ),
    (
        "kv_cache_filled_ratio",
        "Share of a pool's pages that are leased or cached",
        ("owner", "tier"),
        _of_pools(lambda pool: (pool.leased + pool.cached) / pool.total),
    ),
    (
        "restoration_predicted_seconds",
        "Predicted time of finished restorations",
        ("kind",),
        _restorations("predicted_seconds"),
    ),
    (
        "restoration_observed_seconds",
        "Observed time of finished restorations",
        ("kind",),
        _restorations("observed_seconds"),
    ),
    ("restorations", "Finished restorations", ("kind",), _restorations("count")),
    (
        "restoration_bias",
        "Smoothed relative error of the prediction; above 0, it took longer",
        ("kind",),
        _restorations("bias"),
    ),
    ("restoration_error", "Smoothed relative error, without its sign", ("kind",), _restorations("error")),
)

# -- counters of the core ---------------------------------------------------------------------------------------------

SINGLE: tuple[tuple[str, str, str, float], ...] = (
    ("inputs_failed", "inputs_failed", "Times that the core raised for an input, at the active scheduler", 1),
    ("inputs_quarantined", "inputs_quarantined", "Inputs that every scheduler leaves out of its fold", 1),
    ("requests_accepted", "requests_accepted", "Requests taken into the queue", 1),
    ("prompts_resolved", "bases_resolved", "Requests that named the front of their prompt by reference", 1),
    (
        "prompts_wanted",
        "prompts_wanted",
        "References to prompts that had left the tree, so that the whole prompt was asked for",
        1,
    ),
    (
        "admission_tokens_referred",
        "referred_tokens",
        "Tokens of admissions that were not sent because their worker had kept them",
        1,
    ),
    ("texts_missing", "texts_missing", "Admissions that referred to a text which their worker lacked", 1),
    (
        "prefill_saved_seconds",
        "prefill_saved_us",
        "Time that computing the reused tokens would have taken, by the measured speed of their worker",
        1e-6,
    ),
    ("backed_up_pages", "backed_up_pages", "Pages copied from devices to host memory", 1),
    ("num_preemptions", "preemptions", "Running requests that had to give their pages back and start again", 1),
    ("requests_resumed", "requests_resumed", "Requests that went on at another worker", 1),
    ("deferrals", "requests_deferred", "Waits of requests for KV that another request was about to bring", 1),
    (
        "deferred_tokens",
        "deferred_tokens",
        "Tokens that deferred requests did not have to compute, as known when they were deferred",
        1,
    ),
    ("deferral_seconds", "deferral_ms", "Time that requests were deferred", 1e-3),
    ("deferral_deadlines", "deferral_deadlines", "Deferrals that ended by their deadline", 1),
    ("fetch_deadlines", "fetch_deadlines", "Waits for fetches that ended by their deadline", 1),
    ("bundle_hits", "bundle_hits", "Requests that joined the load of another request in their batch", 1),
    ("requests_put_aside", "requests_put_aside", "Requests put aside because a batch was loading-bound", 1),
    ("requests_stolen", "requests_stolen", "Waiting requests that an idle worker took over", 1),
    ("adapter_loads", "adapters_attached", "LoRA adapters that a worker has loaded", 1),
    ("adapter_load_failures", "adapters_failed", "LoRA adapters that a worker could not load", 1),
    ("batches", "batches_planned", "Batches sent", 1),
    ("batches_loading_bound", "batches_loading_bound", "Batches that load for longer than they compute", 1),
    ("prefill_planned_tokens", "prefill_tokens_planned", "Prompt tokens planned to be computed", 1),
    ("load_planned_tokens", "load_tokens_planned", "Tokens planned to be loaded from host memory", 1),
    ("batch_seconds", "compute_us", "Wall time of the steps of batches", 1e-6),
    ("load_seconds", "load_us", "Time of loads, from first page to last", 1e-6),
    ("loaded_tokens", "loaded_tokens", "Tokens that batches loaded", 1),
    ("stall_seconds", "stall_us", "Time in which computation waited for a load", 1e-6),
    ("bubble_seconds", "bubble_us", "Time of decode steps that ran while a batch only loaded", 1e-6),
    ("bubble_tokens", "bubble_tokens", "Tokens sampled by such decode steps", 1),
    ("restored_tokens", "restored_tokens", "Tokens restored from hidden states in place of being computed", 1),
    ("restore_seconds", "restore_us", "Time in which workers restored tokens from hidden states", 1e-6),
    (
        "restores_refused",
        "restores_refused",
        "Restorations that failed because hidden states differed from those saved",
        1,
    ),
    (
        "restorations_explored",
        "restorations_explored",
        "Trials of ways to restore that were slow when last measured",
        1,
    ),
    ("promoted_pages", "promoted_pages", "Pages that promotions brought to devices ahead of demand", 1),
    ("fetched_tokens", "fetched_tokens", "Tokens whose KV was fetched to host memory from a lower tier", 1),
    ("fetched_tokens_remote", "fetched_tokens_remote", "Fetched tokens that came from an object store", 1),
    ("fetched_tokens_lent", "fetched_tokens_lent", "Fetched tokens that came from another node's host memory", 1),
    ("raised_tokens", "raised_tokens", "Tokens that a node fetched from its disk to be read by another", 1),
    ("handed_on_pages", "handed_on_pages", "Host pages of draining nodes that other nodes have copied", 1),
    ("hand_over_pauses", "node_drain_pauses", "Times that a draining node's hand-over was paused", 1),
    ("quarantined_pages", "quarantined_pages", "Host pages taken out of use: identity or checksum was wrong", 1),
    ("sparse_tokens_read", "sparse_tokens_read", "Tokens of prefixes that were read in part", 1),
    ("sparse_prefixes_refused", "sparse_refused", "Prefixes planned to be read in part that could not be", 1),
)
"""Counters of the core with a metric of their own: metric's name, counter's name, meaning, and unit (a factor)."""

LABELLED: tuple[tuple[str, str, tuple[str, ...], tuple[tuple[tuple[str, ...], str], ...]], ...] = (
    (
        "hit_tokens",
        "Tokens reused by admitted requests, by the tier that held them; attempts after a failure count again",
        ("source",),
        tuple(
            ((source,), f"hit_tokens_{source}") for source in ("device", "host", "disk", "remote", "neighbour", "lent")
        ),
    ),
    (
        "evicted_pages",
        "Pages that left a pool: chosen by its policy, displaced by a promotion, or flushed by an order",
        ("tier", "reason"),
        (
            (("device", "policy"), "evicted_pages_device"),
            (("device", "promotion"), "promotion_evicted_pages"),
            (("device", "flush"), "flushed_pages_device"),
            (("host", "policy"), "evicted_pages_host"),
            (("host", "flush"), "flushed_pages_host"),
        ),
    ),
    (
        "host_admission_pages",
        "Pages evicted from devices, by whether host memory took them; refused ones were used too rarely, were colder "
        "than those they would have displaced, or were over their owner's quota",
        ("outcome",),
        (
            (("admitted",), "host_admitted_pages"),
            (("refused_frequency",), "host_refused_frequency_pages"),
            (("refused_hotness",), "host_refused_hotness_pages"),
            (("refused_quota",), "host_refused_quota_pages"),
        ),
    ),
    (
        "backups",
        "Copies from devices to host memory",
        ("outcome",),
        ((("started",), "backups_started"), (("done",), "backups_done"), (("failed",), "backups_failed")),
    ),
    (
        "cache_lease_events",
        "Leases that requests asked for, by outcome: among others, replaced by a later one of the session, ended early "
        "because the budget was full, or lost with the pages that they covered",
        ("event",),
        tuple(
            ((event,), f"cache_leases_{event}")
            for event in ("granted", "refused", "renewed", "replaced", "gave_way", "expired", "lost")
        ),
    ),
    (
        "promotions",
        "Promotions from host memory to devices",
        ("outcome",),
        ((("started",), "promotions_started"), (("failed",), "promotions_failed")),
    ),
    (
        "loads",
        "Loads of requests to devices, from host memory or from a neighbour's device",
        ("source",),
        ((("host",), "loads_started"), (("neighbour",), "neighbour_loads_started")),
    ),
    (
        "fetches",
        "Fetches from disk and object store to host memory, of KV and of hidden states",
        ("form", "outcome"),
        tuple(
            ((form, outcome), f"{prefix}fetches_{outcome}")
            for form, prefix in (("kv", ""), ("hidden", "hidden_"))
            for outcome in ("started", "done", "failed", "cancelled")
        ),
    ),
    (
        "saves",
        "Saves to disk, of KV and of hidden states",
        ("form", "outcome"),
        tuple(
            ((form, outcome), f"{prefix}saves_{outcome}")
            for form, prefix in (("kv", ""), ("hidden", "hidden_"))
            for outcome in ("started", "done", "failed")
        ),
    ),
    (
        "saved_chunks",
        "Chunks that saves wrote",
        ("form",),
        ((("kv",), "saved_chunks"), (("hidden",), "saved_hidden_chunks")),
    ),
    (
        "members_lost",
        "Workers and storages that ended without leaving, or whose heartbeats stopped",
        ("kind",),
        ((("worker",), "workers_lost"), (("storage",), "storages_lost")),
    ),
)
"""Families of several counters: name, meaning, labels, and (values of the labels, counter) of each sample."""

BY_CODE: tuple[tuple[str, str, str], ...] = (
    ("requests_refused", "Requests that the scheduler did not take into the queue", "refused_"),
    ("requests_failed", "Accepted requests that ended with an error of the scheduler's", "failed_"),
)
"""Families with a label ``code``, an error code: the rest of each counter's name behind this prefix."""

CELL_GAUGES = [(declare("gauge", name, meaning, labels), reading) for name, meaning, labels, reading in GAUGES]
CELL_SINGLE = [(declare("counter", name, meaning), counter, unit) for name, counter, meaning, unit in SINGLE]
CELL_LABELLED = [(declare("counter", name, meaning, labels), rows) for name, meaning, labels, rows in LABELLED]
CELL_BY_CODE = [(declare("counter", name, meaning, ("code",)), prefix) for name, meaning, prefix in BY_CODE]
CELL_ALL = declare("counter", "cell", "Every counter of the core by its own name", ("counter",))


def cell_facts() -> list[MetricFacts]:
    """Return all families of the cell, in the order in which they are exported."""
    return [
        *(facts for facts, _ in CELL_GAUGES),
        *(facts for facts, _, _ in CELL_SINGLE),
        *(facts for facts, _ in CELL_LABELLED),
        *(facts for facts, _ in CELL_BY_CODE),
        CELL_ALL,
    ]


def counter_families(counters: Mapping[str, int]) -> Iterable[Metric]:
    """Yield the families of the core's counters; a counter that is absent is exported as 0."""
    for facts, name, unit in CELL_SINGLE:
        yield filled_family(facts, [((), counters.get(name, 0) * unit)])
    for facts, rows in CELL_LABELLED:
        yield filled_family(facts, [(labels, counters.get(name, 0)) for labels, name in rows])
    for facts, prefix in CELL_BY_CODE:
        codes = [name for name in counters if name.startswith(prefix)]
        yield filled_family(facts, [((name.removeprefix(prefix),), counters[name]) for name in codes])
    yield filled_family(CELL_ALL, [((name,), value) for name, value in counters.items()])
