"""The gateway's metrics, named as users of vLLM know them, under ``thermocline_``."""

from __future__ import annotations

from services.gateway.assembly import Placement
from services.gateway.pending import Generation
from shared.messages.tokens import Usage
from shared.metrics import counter, gauge, histogram

_TOKEN_COUNTS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

HTTP_REQUESTS = counter("http_requests", "HTTP responses", ("route", "method", "status"))
IN_FLIGHT = gauge("num_requests_in_flight", "Choices in progress at this gateway")
CONNECTIONS_OPEN = gauge("http_requests_open", "HTTP requests being answered")
REQUEST_SUCCESS = counter("request_success", "Choices that ended well", ("finished_reason",))
REQUEST_FAILURE = counter("request_failure", "Choices that ended with an error", ("code",))
TIME_TO_FIRST_TOKEN = histogram("time_to_first_token_seconds", "From submission to the first token at the gateway")
INTER_TOKEN_LATENCY = histogram("inter_token_latency_seconds", "Between two messages with tokens of one choice")
E2E_LATENCY = histogram("e2e_request_latency_seconds", "From submission to the end of a choice")
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of choices that got an answer")
CACHED_TOKENS = counter("prompt_tokens_cached", "Prompt tokens found in a cache", ("tier",))
GENERATION_TOKENS = counter("generation_tokens", "Output tokens")
REQUEST_PROMPT_TOKENS = histogram("request_prompt_tokens", "Prompt tokens of a choice", buckets=_TOKEN_COUNTS)
REQUEST_GENERATION_TOKENS = histogram("request_generation_tokens", "Output tokens of a choice", buckets=_TOKEN_COUNTS)
TOKEN_ITEMS = counter("gateway_token_items", "Items of token messages by what became of them", ("placement",))
PLACEMENTS = {placement: TOKEN_ITEMS.labels(placement.value) for placement in Placement}
FETCHED = TOKEN_ITEMS.labels("fetched")
NOTICES = counter("gateway_notices", "Notices of the scheduler", ("word",))
TOKENS_DROPPED = gauge("gateway_token_messages_dropped", "Token messages lost to a full subscription")
OUTBOX_WAITING = gauge("gateway_outbox_waiting", "Cancellations and resumptions not yet stored")


def observe_end(generation: Generation, now_s: float) -> None:
    """Count the choices of a generation that is over."""
    for choice in generation.choices:
        assembly = choice.assembly
        usage = assembly.usage or Usage()
        GENERATION_TOKENS.inc(len(assembly.tokens))
        REQUEST_GENERATION_TOKENS.observe(len(assembly.tokens))
        E2E_LATENCY.observe(now_s - choice.started_s)
        if assembly.tokens:
            PROMPT_TOKENS.inc(choice.request.prompt_tokens)
            REQUEST_PROMPT_TOKENS.observe(choice.request.prompt_tokens)
            CACHED_TOKENS.labels("device").inc(usage.device_tokens)
            CACHED_TOKENS.labels("host").inc(usage.host_tokens)
            CACHED_TOKENS.labels("disk").inc(usage.disk_tokens)
            CACHED_TOKENS.labels("remote").inc(usage.remote_tokens)
            CACHED_TOKENS.labels("neighbour").inc(usage.neighbour_tokens)
            CACHED_TOKENS.labels("hidden").inc(usage.hidden_tokens)
        if choice.failure is not None:
            REQUEST_FAILURE.labels(choice.failure.code).inc()
        else:
            REQUEST_SUCCESS.labels(assembly.finish or "unknown").inc()
