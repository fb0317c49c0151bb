"""Prometheus metrics: every process has one registry and can serve it, and its readiness, over HTTP on loopback.

Names start with ``thermocline_``; units are base units (seconds, bytes, tokens, pages). Each declared metric is also in
``FACTS``, from which the reference is made (``tools.metric_docs``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
    make_wsgi_app,
    start_http_server,
)

from shared.errors import OperatorError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Creation times of series are of no use here, and would nearly double what every scrape reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry(auto_describe=True)

PREFIX = "thermocline_"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """A declared metric. ``name`` is that of its family, without a counter's ``_total``."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """The name to query; for a histogram the name before ``_bucket``, ``_sum`` and ``_count``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


FACTS: dict[str, MetricFacts] = {}
"""Every metric declared in this process so far, by name."""


LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0
)  # fmt: skip


def declare(kind: Kind, name: str, documentation: str, labels: tuple[str, ...] = ()) -> MetricFacts:
    """Record a metric and return its facts; for one that is collected without an object of its own, that is all.

    Raises AssertionError when it was declared otherwise before.
    """
    facts = MetricFacts(PREFIX + name.removesuffix("_total"), kind, documentation, labels)
    assert FACTS.setdefault(facts.name, facts) == facts, f"{facts.name} is declared twice"
    return facts


def counter(
    name: str, documentation: str, labels: tuple[str, ...] = (), known: Iterable[tuple[str, ...]] = ()
) -> Counter:
    """Declare a counter and return it, registered under its name without ``_total``, which Prometheus appends.

    The series with ``known`` values of the labels are there from the start, at 0: to Prometheus, a series that begins
    at 1 has not increased, so an alert would miss the first event.
    """
    made = Counter(declare("counter", name, documentation, labels).name, documentation, labels, registry=REGISTRY)
    for values in known:
        made.labels(*values)
    return made


def gauge(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
    """Declare a gauge and return it, registered in this process's registry."""
    return Gauge(declare("gauge", name, documentation, labels).name, documentation, labels, registry=REGISTRY)


def histogram(
    name: str,
    documentation: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
) -> Histogram:
    """Declare a histogram and return it; ``buckets`` are upper bounds, in seconds by default."""
    facts = declare("histogram", name, documentation, labels)
    return Histogram(facts.name, documentation, labels, registry=REGISTRY, buckets=buckets)


def render(*beginnings: str) -> bytes:
    """Return the registry in Prometheus text format, or only the families whose names begin with one of these."""
    return generate_latest(_chosen(beginnings))


def _chosen(beginnings: tuple[str, ...]) -> CollectorRegistry:
    return _Families(beginnings) if beginnings else REGISTRY


class _Families(CollectorRegistry):
    """The registry's families whose names begin with one of ``beginnings``, given without the common prefix."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = tuple(PREFIX + beginning for beginning in beginnings)

    def collect(self) -> Iterator[Metric]:
        """Yield the chosen families of the process's registry."""
        return (family for family in REGISTRY.collect() if family.name.startswith(self._beginnings))


READY_PATH = "/health/ready"


def serve(
    port: int, host: str = "127.0.0.1", not_ready: Callable[[], str] | None = None, beginnings: tuple[str, ...] = ()
) -> None:
    """Serve ``/metrics`` from a daemon thread, of all families or of those of :func:`render`; port 0 is off.

    With ``not_ready``, ``/health/ready`` answers, too: 503 with the reason that it returns, and 200 for "".
    Raises OperatorError when the address is not available.
    """
    if not port:
        return
    registry = _chosen(beginnings)
    try:
        server, _ = start_http_server(port, host, registry=registry)
    except OSError as error:
        raise OperatorError(f"--metrics-port: cannot listen on {host}:{port}: {error}") from error
    if not_ready is not None:
        server.set_app(_with_readiness(make_wsgi_app(registry), not_ready))


def _with_readiness(metrics: WSGIApplication, not_ready: Callable[[], str]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != READY_PATH:
            return metrics(environ, start)
        reason = not_ready()
        start("503 Service Unavailable" if reason else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
        return [(reason or "ready").encode() + b"\n"]

    return answer
