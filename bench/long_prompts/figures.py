"""Spreads of samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.long_prompts.asking import Sample
from thermocline.client.figures import quantile

PARTS = ("accept", "broker", "queue", "deferral", "prefetch_wait", "load", "restore", "compute", "deliver")


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, 99th percentile (the largest of fewer than 100) and mean."""
    found = list(values)
    return {
        "p50": round(statistics.median(found), 3),
        "p99": round(quantile(found, 0.99), 3),
        "mean": round(statistics.fmean(found), 3),
    }


def of_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Times to first token, and the parts that these are made of where the server says them."""
    found: dict[str, Any] = {
        "requests": len(samples),
        "prompt_tokens": round(statistics.median(sample.prompt_tokens for sample in samples)),
        "cached_tokens": round(statistics.median(sample.cached_tokens for sample in samples)),
        "ttft_ms": spread(sample.ttft_ms for sample in samples),
    }
    if samples[0].parts:
        names = [name for name in PARTS if any(name in sample.parts for sample in samples)]
        found["parts_ms"] = {name: spread(sample.parts.get(name, 0.0) for sample in samples) for name in names}
        found["outside_ms"] = spread(sample.outside_ms for sample in samples)
    return found


def ratio(above: float, below: float, target: float) -> dict[str, float]:
    """A ratio that is to be ``target`` at the least."""
    return {"ratio": round(above / below, 3), "target": target}
