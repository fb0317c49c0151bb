"""Figures of explained requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.openai_schema.explanation import Explanation


def cached_share(requests: Sequence[Explanation]) -> float | None:
    """Return the share of prompt tokens that were not computed; None without any report."""
    spans = [span for request in requests for span in request.prompt]
    told = sum(span.end - span.start for span in spans)
    cached = sum(span.end - span.start for span in spans if span.source != "computed")
    return cached / told if told else None


def ttft_quantile_ms(requests: Sequence[Explanation], fraction: float) -> float | None:
    """Return a nearest-rank quantile of the times to first token; None without any."""
    ordered = sorted(request.ttft_ms for request in requests if request.ttft_ms is not None)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None
