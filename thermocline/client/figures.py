"""Figures of measured answers: what the demo, the trace driver and the benchmarks all report."""

from __future__ import annotations

from thermocline.client.stream import Answer

# From the complete HTTP request to its first step: gateway, stream, scheduler, plan, and the wait for the step.
BROKER_STEPS = ("accept_ms", "admit_ms", "queue_ms")


def quantile(values: list[float], fraction: float) -> float:
    """Return the nearest-rank quantile; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def broker_ms(answer: Answer) -> float:
    """Return the part of this answer's TTFT before its first step, in ms; an unknown part counts as 0."""
    return sum(answer.timing_ms.get(step) or 0.0 for step in BROKER_STEPS)
