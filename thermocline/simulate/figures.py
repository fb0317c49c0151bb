"""Counters of a simulation, in memory that does not grow with the requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

_WIDTH = log(1.002)  # Quantiles are accurate to 0.1%.


@dataclass(slots=True)
class Distribution:
    """A histogram of values in buckets that are each 0.2% wide; the mean is exact."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        """Count one value; values of 0 and below share one bucket."""
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)
        bucket = round(log(value) / _WIDTH) if value > 0 else -(1 << 30)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        """Exact mean of all values; 0 for none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """Return the nearest-rank quantile to 0.1%; 0 for no values."""
        if not self.count:
            return 0.0
        left = min(self.count - 1, int(fraction * self.count))
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left < 0:
                return exp(bucket * _WIDTH) if bucket > -(1 << 30) else 0.0
        return self.largest

    def summary(self) -> dict[str, float]:
        """Return ``mean``, ``p50`` and ``p99``."""
        return {"mean": self.mean, "p50": self.quantile(0.5), "p99": self.quantile(0.99)}


@dataclass(slots=True)
class RequestFigures:
    """Totals over requests. Hit tokens are of the caller's prompt, at a request's first admission."""

    submitted: int = 0
    finished: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # By error code.
    input_tokens: int = 0  # Prompts of admitted requests.
    output_tokens: int = 0  # Answers of finished requests.
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    neighbour_tokens: int = 0
    lent_tokens: int = 0
    ttft_ms: Distribution = field(default_factory=Distribution)
    tpot_ms: Distribution = field(default_factory=Distribution)  # Mean time per token after the first.
    latency_ms: Distribution = field(default_factory=Distribution)
