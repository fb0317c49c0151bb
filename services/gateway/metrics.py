"""The gateway's metrics, with vLLM's names under the prefix ``thermocline_``."""

from __future__ import annotations

from services.gateway.assembly import Assembly, Placement
from services.gateway.pending import Choice, Generation
from shared.messages.tokens import Usage
from shared.metrics import LATENCY_BUCKETS_S, counter, gauge, histogram

_TOKEN_COUNTS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_REQUEST_BUCKETS_S = (*LATENCY_BUCKETS_S, 120.0, 300.0, 600.0, 1200.0, 1800.0)  # A request may live for half an hour.

HTTP_REQUESTS = counter("http_requests", "HTTP responses", ("route", "method", "status"))
IN_FLIGHT = gauge("num_requests_in_flight", "Choices in progress at this gateway")
CONNECTIONS_OPEN = gauge("http_requests_open", "HTTP requests being answered")
REQUEST_SUCCESS = counter(
    "request_success", "Choices that ended well", ("finished_reason",), known=[("stop",), ("length",)]
)
RESPONSES_NOT_KEPT = counter("responses_not_kept", "Responses that should have been kept and were not", ("reason",))
REQUEST_FAILURE = counter("request_failure", "Choices that ended with an error", ("code",))
TIME_TO_FIRST_TOKEN = histogram(
    "time_to_first_token_seconds", "From submission to the first token at the gateway", buckets=_REQUEST_BUCKETS_S
)
INTER_TOKEN_LATENCY = histogram("inter_token_latency_seconds", "Between two messages with tokens of one choice")
E2E_LATENCY = histogram(
    "e2e_request_latency_seconds", "From submission to the end of a choice", buckets=_REQUEST_BUCKETS_S
)
QUEUE_TIME = histogram(
    "request_queue_time_seconds",
    "From a choice's storage in the stream to its arrival at a worker",
    buckets=_REQUEST_BUCKETS_S,
)
PREFILL_TIME = histogram(
    "request_prefill_time_seconds",
    "From the step of a choice's first chunk to its first token",
    buckets=_REQUEST_BUCKETS_S,
)
DECODE_TIME = histogram(
    "request_decode_time_seconds", "From a choice's first token at the gateway to its last", buckets=_REQUEST_BUCKETS_S
)
INFERENCE_TIME = histogram(
    "request_inference_time_seconds",
    "From the step of a choice's first chunk to its last token",
    buckets=_REQUEST_BUCKETS_S,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "request_time_per_output_token_seconds", "Time of a choice from its first token on, per further token"
)
PREFIX_QUERIES = counter("prefix_cache_queries", "Prompt tokens of choices that were looked up in the cache")
PREFIX_HITS = counter("prefix_cache_hits", "Prompt tokens looked up and found in the cache, by source", ("source",))
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of choices that got an answer")
CACHED_TOKENS = counter("prompt_tokens_cached", "Prompt tokens found in a cache", ("tier",))
IMPORTANCE_CHOICES = counter(
    "importance_choices", "Choices that allowed loading by importance, by outcome", ("outcome",)
)
IMPORTANCE_PREFIX_TOKENS = counter("importance_prefix_tokens", "Tokens of prefixes that were loaded in part")
IMPORTANCE_LOADED_TOKENS = counter(
    "importance_loaded_tokens", "Tokens of those prefixes that were loaded in each layer"
)
IMPORTANCE_LAYERS = counter("importance_layers", "Layers loaded by importance, by what probe heads did", ("probes",))
IMPORTANCE_DISK_BYTES = counter("importance_disk_bytes", "Bytes read from disks to load by importance")
GENERATION_TOKENS = counter("generation_tokens", "Output tokens")
REQUEST_PROMPT_TOKENS = histogram("request_prompt_tokens", "Prompt tokens of a choice", buckets=_TOKEN_COUNTS)
REQUEST_GENERATION_TOKENS = histogram("request_generation_tokens", "Output tokens of a choice", buckets=_TOKEN_COUNTS)
TOKEN_ITEMS = counter("gateway_token_items", "Items of token messages, by placement", ("placement",))
PLACEMENTS = {placement: TOKEN_ITEMS.labels(placement.value) for placement in Placement}
FETCHED = TOKEN_ITEMS.labels("fetched")
RECLAIMED = counter("gateway_requests_reclaimed", "Requests restarted because the end of their answer was lost")
PROMPTS_SENT = counter(
    "gateway_prompts_sent",
    "Prompts sent to the scheduler: as a base that it holds and a tail, whole, or whole because it asked for that",
    ("how",),
)
NOTICES = counter("gateway_notices", "Notices of the scheduler", ("word",))
TENANTS = gauge("gateway_tenants", "Tenants of the file of tenants")
TENANT_FILE_FAULTS = counter("gateway_tenant_file_faults", "Changes of the file of tenants that were refused")
RATE_LIMITED = counter("gateway_rate_limited", "Requests beyond a limit of their tenant", ("limit",))
OUTBOX_WAITING = gauge("gateway_outbox_waiting", "Cancellations and resumptions not yet stored")

SOURCE_NAMES = ("device", "host", "disk", "remote", "neighbour", "hidden", "sparse", "lent")
"""Sources of prompt tokens that are not computed."""

_SOURCES = {name: CACHED_TOKENS.labels(name) for name in SOURCE_NAMES}
_HITS = {name: PREFIX_HITS.labels(name) for name in SOURCE_NAMES}


def observe_end(generation: Generation, now_s: float) -> None:
    """Count the choices of a generation that is over; ``now_s`` is on the clock of their times."""
    for choice in generation.choices:
        assembly = choice.assembly
        usage = assembly.usage or Usage()
        GENERATION_TOKENS.inc(len(assembly.tokens))
        REQUEST_GENERATION_TOKENS.observe(len(assembly.tokens))
        E2E_LATENCY.observe(now_s - choice.started_s)
        if assembly.tokens:
            PROMPT_TOKENS.inc(choice.request.prompt_tokens)
            REQUEST_PROMPT_TOKENS.observe(choice.request.prompt_tokens)
            is_looked_up = choice.request.cache.read
            if is_looked_up:
                PREFIX_QUERIES.inc(choice.request.prompt_tokens)
            for source, cached in _SOURCES.items():
                tokens = getattr(usage, f"{source}_tokens")
                cached.inc(tokens)
                if is_looked_up:
                    _HITS[source].inc(tokens)
            _observe_times(choice)
            if choice.request.cache.importance is not None:
                IMPORTANCE_CHOICES.labels("lossy" if assembly.lossy else "exact").inc()
        _observe_importance(assembly)
        if choice.failure is not None:
            REQUEST_FAILURE.labels(choice.failure.code).inc()
        else:
            REQUEST_SUCCESS.labels(assembly.finish or "unknown").inc()


def _observe_times(choice: Choice) -> None:
    """Observe the parts of a choice that got tokens; the worker's times are unknown where its first item was lost."""
    timing, decode_s = choice.assembly.timing, choice.progress_s - choice.first_token_s
    if timing is not None and timing.started_ns and timing.first_token_ns:
        prefill_s = max(0, timing.first_token_ns - timing.started_ns) / 1e9
        QUEUE_TIME.observe(max(0, timing.admitted_ns - timing.accepted_ns) / 1e9)
        PREFILL_TIME.observe(prefill_s)
        INFERENCE_TIME.observe(prefill_s + decode_s)
    DECODE_TIME.observe(decode_s)
    if len(choice.assembly.tokens) > 1:
        TIME_PER_OUTPUT_TOKEN.observe(decode_s / (len(choice.assembly.tokens) - 1))


def _observe_importance(assembly: Assembly) -> None:
    for usage in assembly.lossy.values():
        loaded = usage.importance
        if loaded is not None:
            IMPORTANCE_PREFIX_TOKENS.inc(usage.sparse_tokens)
            IMPORTANCE_LOADED_TOKENS.inc(loaded.loaded_tokens)
            IMPORTANCE_LAYERS.labels("agreed").inc(loaded.layers - loaded.layers_fallen_back)
            IMPORTANCE_LAYERS.labels("disagreed").inc(loaded.layers_fallen_back)
            IMPORTANCE_DISK_BYTES.inc(loaded.disk_bytes)
