"""Metrics by tenant.

Only tenants of the file have series of their own, and all others are ``other``: no caller can create series, and those
of a tenant that leaves the file are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.gateway.failures import TENANT_QUEUE_FULL
from services.gateway.metrics import SOURCE_NAMES
from services.gateway.openai_schema.cell import CellTenant
from services.gateway.pending import Generation
from services.gateway.tenants import OTHER
from shared.errors import QueueFull
from shared.messages.tokens import Usage
from shared.metrics import MetricFacts, counter, declare

REQUESTS = declare(
    "gauge",
    "tenant_requests",
    "Requests of a tenant in the whole cell, by the scheduler's last status; the same at every gateway",
    ("tenant", "state"),
)
CACHED_BYTES = declare(
    "gauge",
    "tenant_cached_bytes",
    "Cached bytes of a tenant in all pools of a tier, by the scheduler's last status; the same at every gateway, and "
    "for all tenants that share a salt",
    ("tenant", "tier"),
)
PROMPT_TOKENS = counter("tenant_prompt_tokens", "Prompt tokens of a tenant's choices that got an answer", ("tenant",))
PROMPT_TOKENS_CACHED = counter(
    "tenant_prompt_tokens_cached", "Prompt tokens of those choices that were found in a cache", ("tenant",)
)
GENERATION_TOKENS = counter("tenant_generation_tokens", "Output tokens of a tenant", ("tenant",))
REJECTED = counter(
    "tenant_requests_rejected",
    "Requests of a tenant that were answered with 429: beyond its own limits of requests, tokens or concurrency, or "
    "because the cell's queue or this gateway was full",
    ("tenant", "reason"),
)

QUEUE, GATEWAY = "queue", "gateway"
REASONS = ("requests", "tokens", "concurrency", QUEUE, GATEWAY)

_OF_THE_QUEUE = (QueueFull.code, TENANT_QUEUE_FULL)
_COUNTED = (PROMPT_TOKENS, PROMPT_TOKENS_CACHED, GENERATION_TOKENS)


def begin(tenant: str) -> None:
    """Create the series of a tenant in the file, at 0."""
    for counted in _COUNTED:
        counted.labels(tenant)
    for reason in REASONS:
        REJECTED.labels(tenant, reason)


def forget(tenant: str) -> None:
    """Remove the series of a tenant that left the file."""
    for counted in _COUNTED:
        counted.remove(tenant)
    for reason in REASONS:
        REJECTED.remove(tenant, reason)


def turned_away(tenant: str, reason: str) -> None:
    """Count a request that was answered with 429, by the limit that refused it."""
    REJECTED.labels(tenant, reason).inc()


def observe_end(tenant: str, generation: Generation) -> None:
    """Count a generation that is over; ``tenant`` is the name in metrics (``Account.label``)."""
    for choice in generation.choices:
        tokens = len(choice.assembly.tokens)
        GENERATION_TOKENS.labels(tenant).inc(tokens)
        if tokens:
            PROMPT_TOKENS.labels(tenant).inc(choice.request.prompt_tokens)
            usage = choice.assembly.usage or Usage()
            PROMPT_TOKENS_CACHED.labels(tenant).inc(sum(getattr(usage, f"{source}_tokens") for source in SOURCE_NAMES))
    if any(choice.failure is not None and choice.failure.code in _OF_THE_QUEUE for choice in generation.choices):
        turned_away(tenant, QUEUE)


class TenantCollector(Collector):
    """A collector that reads the cell's figures of each tenant at each scrape, in the scraping thread."""

    def __init__(self, tenants: Callable[[], Sequence[CellTenant]]) -> None:
        """Read the figures from ``tenants``, which must be safe to call from any thread."""
        self._tenants = tenants

    def describe(self) -> Iterator[Metric]:
        """Yield the families without samples, from which the registry learns their names."""
        return (_family(facts) for facts in (REQUESTS, CACHED_BYTES))

    def collect(self) -> Iterator[Metric]:
        """Yield the requests and cached bytes of each tenant, by the scheduler's last status."""
        requests, cached = _family(REQUESTS), _family(CACHED_BYTES)
        for tenant in self._tenants():
            for state, number in (("running", tenant.running), ("waiting", tenant.waiting)):
                requests.add_metric((tenant.tenant, state), number)
            for tier in ("device", "host", "disk"):
                cached.add_metric((tenant.tenant, tier), getattr(tenant, f"{tier}_bytes"))
        yield requests
        yield cached


def _family(facts: MetricFacts) -> GaugeMetricFamily:
    return GaugeMetricFamily(facts.name, facts.documentation, labels=facts.labels)


begin(OTHER)  # All callers, where there is no file.
