"""Prometheus metrics: every process has one registry and can serve it over HTTP on loopback.

Names start with ``thermocline_``; units are base units (seconds, bytes, tokens, pages).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

REGISTRY = CollectorRegistry(auto_describe=True)

LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0
)  # fmt: skip


def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"thermocline_{name}", documentation, labels, registry=REGISTRY)


def gauge(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"thermocline_{name}", documentation, labels, registry=REGISTRY)


def histogram(
    name: str,
    documentation: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
) -> Histogram:
    return Histogram(f"thermocline_{name}", documentation, labels, registry=REGISTRY, buckets=buckets)


def render() -> bytes:
    """The registry in Prometheus text format."""
    return generate_latest(REGISTRY)


def serve(port: int, host: str = "127.0.0.1") -> None:
    """Serve ``/metrics`` from a daemon thread; port 0 is off."""
    if port:
        start_http_server(port, host, registry=REGISTRY)
