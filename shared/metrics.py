"""Prometheus metrics: every process has one registry and can serve it over HTTP on loopback.

Names start with ``thermocline_``; units are base units (seconds, bytes, tokens, pages). What is declared is also
written down in ``FACTS``, from which the reference is made (``tools.metric_docs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)

# When a series began is of no use to anybody here, and would nearly double what every scrape reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry(auto_describe=True)

PREFIX = "thermocline_"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """A metric as its readers know it. ``name`` is that of its family, without a counter's ``_total``."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """The name to query; of a histogram the name that ``_bucket``, ``_sum`` and ``_count`` follow."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


FACTS: dict[str, MetricFacts] = {}
"""By name, every metric that has been declared in this process so far."""


LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0
)  # fmt: skip


def declare(kind: Kind, name: str, documentation: str, labels: tuple[str, ...] = ()) -> MetricFacts:
    """Write a metric down; for what is collected without an object of its own, that is all."""
    facts = MetricFacts(PREFIX + name.removesuffix("_total"), kind, documentation, labels)
    assert FACTS.setdefault(facts.name, facts) == facts, f"{facts.name} is declared twice"
    return facts


def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(declare("counter", name, documentation, labels).name, documentation, labels, registry=REGISTRY)


def gauge(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(declare("gauge", name, documentation, labels).name, documentation, labels, registry=REGISTRY)


def histogram(
    name: str,
    documentation: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
) -> Histogram:
    facts = declare("histogram", name, documentation, labels)
    return Histogram(facts.name, documentation, labels, registry=REGISTRY, buckets=buckets)


def render(*beginnings: str) -> bytes:
    """Return the registry in Prometheus text format, or only the families whose names begin with one of these."""
    return generate_latest(_Families(beginnings) if beginnings else REGISTRY)


class _Families(CollectorRegistry):
    """Families of the registry whose names begin as given, without the common prefix."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = tuple(PREFIX + beginning for beginning in beginnings)

    def collect(self) -> Iterator[Metric]:
        return (family for family in REGISTRY.collect() if family.name.startswith(self._beginnings))


def serve(port: int, host: str = "127.0.0.1") -> None:
    """Serve ``/metrics`` from a daemon thread; port 0 is off."""
    if port:
        start_http_server(port, host, registry=REGISTRY)
