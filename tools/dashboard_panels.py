"""What the dashboards show: tables of panels with their queries. ``tools.dashboards`` makes Grafana's JSON of them."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"
P = "thermocline_"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph. ``queries`` are a legend and an expression each; ``unit`` is one of Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """``rows`` are headings with their panels."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def _rate(metric: str, by: str = "") -> str:
    """The rate of a counter, summed over processes, but for the labels ``by``."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({P}{metric}[{RATE}]))"


def _percentiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"p{round(share * 100)}", f"histogram_quantile({share}, sum by (le) (rate({P}{metric}_bucket[{RATE}])))")
        for share in (0.5, 0.9, 0.99)
    )


def _ratio(above: str, below: str) -> str:
    return f"{above} / clamp_min({below}, 1e-9)"


SERVING = Dashboard(
    "thermocline-serving",
    "Thermocline: serving",
    (
        (
            "What clients see",
            (
                Panel("Time to first token", "s", _percentiles("time_to_first_token_seconds")),
                Panel("Inter-token latency", "s", _percentiles("inter_token_latency_seconds")),
                Panel("Whole request", "s", _percentiles("e2e_request_latency_seconds")),
                Panel(
                    "Choices that ended",
                    "reqps",
                    (
                        ("{{finished_reason}}", _rate("request_success_total", "finished_reason")),
                        ("error: {{code}}", _rate("request_failure_total", "code")),
                    ),
                ),
                Panel("HTTP responses", "reqps", (("{{status}}", _rate("http_requests_total", "status")),)),
                Panel(
                    "Tokens per second",
                    "short",
                    (
                        ("prompt", _rate("prompt_tokens_total")),
                        ("output", _rate("generation_tokens_total")),
                    ),
                ),
            ),
        ),
        (
            "Where the time goes",
            (
                Panel("Queue time", "s", _percentiles("request_queue_time_seconds")),
                Panel("Prefill time", "s", _percentiles("request_prefill_time_seconds")),
                Panel("Decode time", "s", _percentiles("request_decode_time_seconds")),
                Panel(
                    "Waiting requests by what for",
                    "short",
                    (("{{reason}}", f"sum by (reason) ({P}num_requests_waiting)"),),
                ),
                Panel(
                    "Requests at workers",
                    "short",
                    (("{{worker}} {{state}}", f"sum by (worker, state) ({P}worker_requests)"),),
                ),
                Panel("Step of a worker", "s", _percentiles("worker_step_seconds")),
            ),
        ),
        (
            "Tenants",
            (
                Panel(
                    "Requests by tenant",
                    "short",
                    (("{{tenant}} {{state}}", f"max by (tenant, state) ({P}tenant_requests)"),),
                    "Of the whole cell. Everybody who is no tenant of the file is other.",
                ),
                Panel(
                    "Tokens per second by tenant",
                    "short",
                    (
                        ("{{tenant}} prompt", _rate("tenant_prompt_tokens_total", "tenant")),
                        ("{{tenant}} output", _rate("tenant_generation_tokens_total", "tenant")),
                    ),
                ),
                Panel(
                    "Turned away with 429",
                    "reqps",
                    (("{{tenant}}: {{reason}}", _rate("tenant_requests_rejected_total", "tenant, reason")),),
                ),
            ),
        ),
        (
            "Failures",
            (
                Panel("Processes up", "short", (("{{job}}", "sum by (job) (up)"),)),
                Panel(
                    "Refused and failed by the scheduler",
                    "reqps",
                    (
                        ("refused: {{code}}", _rate("requests_refused_total", "code")),
                        ("failed: {{code}}", _rate("requests_failed_total", "code")),
                    ),
                ),
                Panel(
                    "Carried on elsewhere",
                    "short",
                    (
                        ("resumed requests", _rate("requests_resumed_total")),
                        ("preemptions", _rate("num_preemptions_total")),
                        ("lost: {{kind}}", _rate("members_lost_total", "kind")),
                    ),
                ),
            ),
        ),
    ),
)

CACHE = Dashboard(
    "thermocline-cache",
    "Thermocline: cache",
    (
        (
            "Hits",
            (
                Panel(
                    "Share of prompt tokens found, by where",
                    "percentunit",
                    (
                        (
                            "{{source}}",
                            f"{_rate('prefix_cache_hits_total', 'source')} / ignoring (source) group_left () "
                            f"clamp_min({_rate('prefix_cache_queries_total')}, 1e-9)",
                        ),
                    ),
                ),
                Panel("Tokens reused", "short", (("{{source}}", _rate("hit_tokens_total", "source")),)),
                Panel(
                    "Prompt tokens computed",
                    "short",
                    (
                        ("planned", _rate("prefill_planned_tokens_total")),
                        ("done", _rate("worker_prefill_tokens_total")),
                    ),
                ),
            ),
        ),
        (
            "Pools and policies",
            (
                Panel(
                    "Pages held by requests",
                    "percentunit",
                    (("{{owner}} {{tier}}", f"sum by (owner, tier) ({P}kv_cache_usage_perc)"),),
                ),
                Panel(
                    "Pages that hold something",
                    "percentunit",
                    (("{{owner}} {{tier}}", f"sum by (owner, tier) ({P}kv_cache_filled_ratio)"),),
                ),
                Panel(
                    "Pages evicted", "short", (("{{tier}}: {{reason}}", _rate("evicted_pages_total", "tier, reason")),)
                ),
                Panel(
                    "Admission to host memory, pages",
                    "short",
                    (("{{outcome}}", _rate("host_admission_pages_total", "outcome")),),
                ),
                Panel(
                    "Promotions",
                    "short",
                    (("{{outcome}}", _rate("promotions_total", "outcome")), ("pages", _rate("promoted_pages_total"))),
                ),
                Panel(
                    "Deferrals",
                    "short",
                    (
                        ("deferrals", _rate("deferrals_total")),
                        ("ended by their deadline", _rate("deferral_deadlines_total")),
                        ("tokens spared", _rate("deferred_tokens_total")),
                    ),
                ),
            ),
        ),
        (
            "Loading",
            (
                Panel("Loads from host memory", "s", _percentiles("worker_load_seconds")),
                Panel("Bytes loaded", "Bps", (("host memory to devices", _rate("worker_load_bytes_total")),)),
                Panel(
                    "Seconds per second of loading",
                    "short",
                    (
                        ("computation waited", _rate("stall_seconds_total")),
                        ("bubbles filled with decoding", _rate("bubble_seconds_total")),
                    ),
                ),
                Panel(
                    "Restoration: predicted and observed, mean",
                    "s",
                    (
                        (
                            "predicted: {{kind}}",
                            f"sum by (kind) ({P}restoration_predicted_seconds) / sum by (kind) ({P}restorations)",
                        ),
                        (
                            "observed: {{kind}}",
                            f"sum by (kind) ({P}restoration_observed_seconds) / sum by (kind) ({P}restorations)",
                        ),
                    ),
                ),
                Panel(
                    "Sparse prefixes: bytes read, by what for",
                    "Bps",
                    (("{{kind}}", _rate("worker_sparse_bytes_total", "kind")),),
                ),
            ),
        ),
        (
            "Tenants",
            (
                Panel(
                    "Cached bytes by tenant",
                    "bytes",
                    (("{{tenant}} {{tier}}", f"max by (tenant, tier) ({P}tenant_cached_bytes)"),),
                    "Tenants with one salt have one cache, and each shows all of it.",
                ),
                Panel(
                    "Share of prompt tokens found, by tenant",
                    "percentunit",
                    (
                        (
                            "{{tenant}}",
                            _ratio(
                                _rate("tenant_prompt_tokens_cached_total", "tenant"),
                                _rate("tenant_prompt_tokens_total", "tenant"),
                            ),
                        ),
                    ),
                ),
            ),
        ),
        (
            "Disk and object store",
            (
                Panel(
                    "Bytes read and written",
                    "Bps",
                    (("{{tier}} {{direction}}", _rate("storage_tier_bytes_total", "tier, direction")),),
                ),
                Panel(
                    "Disk",
                    "bytes",
                    (
                        ("held", f"sum ({P}storage_disk_bytes)"),
                        ("quota", f"sum ({P}storage_disk_quota_bytes)"),
                    ),
                ),
                Panel("Fetches", "s", _percentiles("storage_fetch_seconds")),
                Panel(
                    "Fetches and saves",
                    "short",
                    (
                        ("fetches {{form}} {{outcome}}", _rate("fetches_total", "form, outcome")),
                        ("saves {{form}} {{outcome}}", _rate("saves_total", "form, outcome")),
                    ),
                ),
                Panel(
                    "Integrity",
                    "short",
                    (
                        ("host pages quarantined", _rate("quarantined_pages_total")),
                        ("bad chunks: {{tier}}, {{reason}}", _rate("storage_bad_chunks_total", "tier, reason")),
                    ),
                ),
                Panel(
                    "Object store",
                    "reqps",
                    (
                        ("{{verb}}: {{outcome}}", _rate("storage_remote_requests_total", "verb, outcome")),
                        ("retries of {{verb}}", _rate("storage_remote_retries_total", "verb")),
                    ),
                ),
            ),
        ),
    ),
)

CONTROL = Dashboard(
    "thermocline-control",
    "Thermocline: scheduler and broker",
    (
        (
            "Scheduler",
            (
                Panel("Step of the core", "s", _percentiles("scheduler_step_seconds")),
                Panel("Age of inputs when folded", "s", _percentiles("scheduler_input_age_seconds")),
                Panel(
                    "Inputs and outputs",
                    "short",
                    (
                        ("inputs", _rate("scheduler_inputs_total")),
                        ("outputs", _rate("scheduler_outputs_total")),
                        ("skipped", _rate("scheduler_inputs_skipped_total")),
                    ),
                ),
                Panel(
                    "Active, and behind the stream",
                    "short",
                    (("active", f"sum ({P}scheduler_active)"), ("behind", f"max ({P}scheduler_behind_inputs)")),
                ),
                Panel(
                    "Snapshots",
                    "s",
                    (("pause of the fold", f"max ({P}scheduler_snapshot_pause_seconds)"),),
                ),
                Panel(
                    "Batches",
                    "short",
                    (("all", _rate("batches_total")), ("loading-bound", _rate("batches_loading_bound_total"))),
                ),
            ),
        ),
        (
            "Broker",
            (
                Panel("Plans on their way to workers", "s", _percentiles("worker_plan_delay_seconds")),
                Panel("Plans on their way to storages", "s", _percentiles("storage_plan_delay_seconds")),
                Panel(
                    "Lost and found again",
                    "short",
                    (
                        ("connections lost: {{reason}}", _rate("bus_connections_lost_total", "reason")),
                        ("messages dropped", _rate("bus_messages_dropped_total")),
                        ("plans read from the stream", _rate("worker_plans_fetched_total")),
                        ("permissions denied: {{verb}}", _rate("bus_permissions_denied_total", "verb")),
                    ),
                ),
            ),
        ),
    ),
)
