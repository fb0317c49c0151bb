"""The explanation of a choice, from the records of the gateway, the worker and the scheduler. Pure.

Times come from the clocks of several processes. Each moment is clamped between the one before it and the first token's
delivery, whatever the clocks say, so that the parts always add up to the time to first token.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.openai_schema.explanation import (
    Divergence,
    Explanation,
    PartName,
    PromptPart,
    TimePart,
    Way,
    WayPart,
)
from services.gateway.recent_requests import Figures, RecentRequest
from services.gateway.views.divergence import Decode, divergence_view
from shared.messages.explanations import Admission, PromptSpan, Source, WeighedWay
from shared.messages.tokens import Timing, Usage

_FALLBACK: tuple[tuple[Source, str], ...] = (
    ("device", "device_tokens"),
    ("host", "host_tokens"),
    ("neighbour", "neighbour_tokens"),
    ("lent", "lent_tokens"),
    ("disk", "disk_tokens"),
    ("remote", "remote_tokens"),
    ("hidden", "hidden_tokens"),
    ("sparse", "sparse_tokens"),
)

_LEFT = {
    "evicted": "evicted from {tier} memory by policy {policy}",
    "displaced": "displaced from {tier} memory by a promotion",
    "refused": "left the device, and selective admission refused it a copy in host memory",
    "flushed": "flushed from {tier} memory by an order",
    "failed": "its copy failed verification and was dropped",
    "lost": "lost with its worker or storage",
    "lossy": "computed behind a prefix that was read in part, which is never cached",
}


def explain(
    known: RecentRequest, now_s: float, decode: Decode, *, is_admin: bool, sees_cache: bool = False
) -> Explanation:
    """Return the explanation of a choice. ``sees_cache``: its caller may read what is cached in the choice's namespace.

    Only operators see that another namespace holds the same tokens: it is a tenant's secret.
    """
    figures = known.figures(now_s)
    admission = admission_of_first_token(known, figures)
    end_ns, begin_ns = figures.ended_ns, figures.received_ns
    return Explanation(
        id=known.http_id,
        request_id=known.request_id,
        namespace=known.namespace,
        endpoint=known.endpoint,
        model=known.model,
        created_ms=begin_ns // 1_000_000,
        state=figures.state,
        finish_reason=figures.finish_reason,
        error_code=figures.error_code,
        prompt_tokens=known.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        attempts=max([1, *figures.workers, *(attempt.attempt for attempt in known.admissions)]),
        workers=list(dict.fromkeys(figures.workers.values())),
        ttft_ms=_ms(figures.delivered_ns - begin_ns) if figures.delivered_ns else None,
        total_ms=_ms(end_ns - begin_ns) if end_ns else None,
        parts=time_parts(figures, admission),
        prompt=prompt_parts(known.prompt_tokens, figures.usage, admission, is_admin=is_admin),
        ways=ways_told(admission),
        importance=figures.importance,
        divergence=_divergence(known, admission, decode, sees_cache=is_admin or sees_cache),
    )


def _divergence(
    known: RecentRequest, admission: Admission | None, decode: Decode, *, sees_cache: bool
) -> Divergence | None:
    if admission is None or admission.point is None:
        return None
    point = admission.point
    place = known.places.get(point.position if sees_cache else point.page_start)
    return divergence_view(point, known.prompt_tokens, place, decode, sees_cache=sees_cache)


def time_parts(figures: Figures, admission: Admission | None) -> list[TimePart]:
    """Return the parts of the time to first token, in order; as far as known while there is no token."""
    parts: list[TimePart] = []
    begin_ns = at_ns = figures.received_ns
    for name, end_ns in _moments(figures, admission):
        end_ns = min(max(at_ns, end_ns), figures.delivered_ns) if figures.delivered_ns else max(at_ns, end_ns)
        if end_ns <= at_ns:
            continue
        start_ns = at_ns
        if parts and parts[-1].name == name:
            start_ns = begin_ns + round(parts.pop().start_ms * 1e6)
        parts.append(TimePart(name=name, start_ms=_ms(start_ns - begin_ns), ms=_ms(end_ns - start_ns)))
        at_ns = end_ns
    return parts


def _moments(figures: Figures, admission: Admission | None) -> Iterator[tuple[PartName, int]]:
    """Yield the end of each part, in order; an unknown time is 0."""
    timing = figures.timing or Timing()
    yield "accept", figures.submitted_ns
    if figures.timing is None and figures.delivered_ns:
        # The first item was lost in transit, and with it the worker's times.
        yield "compute", figures.delivered_ns
        return
    yield "broker", timing.accepted_ns
    if admission is not None:
        for wait in admission.waits:
            yield "queue", wait.start_ns
            yield wait.kind, wait.end_ns
        yield "queue", admission.admitted_ns
        yield "broker", timing.admitted_ns
    yield "queue", timing.started_ns
    yield "load", timing.loaded_ns
    yield "restore", timing.restored_ns
    yield "compute", timing.first_token_ns
    yield "deliver", figures.delivered_ns


def prompt_parts(
    prompt_tokens: int, usage: Usage | None, admission: Admission | None, *, is_admin: bool
) -> list[PromptPart]:
    """Return the source of each part of the prompt: by the scheduler, or else by the worker's counts."""
    if admission is not None:
        return [_part(span, admission.admitted_ns, is_admin=is_admin) for span in admission.prompt]
    return _counted(prompt_tokens, usage) if usage is not None else []


def _part(span: PromptSpan, admitted_ns: int, *, is_admin: bool) -> PromptPart:
    reason = span.reason or None
    if reason == "other_salt" and not is_admin:
        reason = "never_stored"
    detail = None
    if span.departure:
        before_s = max(0, admitted_ns - span.at_ns) / 1e9
        left = _LEFT[span.departure].format(tier=span.tier, policy=span.policy)
        detail = f"{left} {before_s:.1f} s before this request was admitted"
    return PromptPart(start=span.start, end=span.end, source=span.source, reason=reason, detail=detail)


def ways_told(admission: Admission | None) -> list[Way]:
    """Return the ways to restore the prefix that were compared before an admission."""
    return [_way(way) for way in admission.ways] if admission is not None else []


def _way(way: WeighedWay) -> Way:
    return Way(
        way=way.way,
        taken=way.is_taken,
        ms=round(way.us / 1000, 3),
        parts=[
            WayPart(
                name=part.name,
                ms=round(part.us / 1000, 3),
                bytes=part.nbytes or None,
                took_ms=round(part.took_us / 1000, 3) if part.took_us >= 0 else None,
            )
            for part in way.parts
        ],
    )


def _counted(prompt_tokens: int, usage: Usage) -> list[PromptPart]:
    """Return sources in the order in which they usually lie along a prompt; why the rest was computed is unknown."""
    parts, start = [], 0
    for source, name in _FALLBACK:
        end = min(prompt_tokens, start + getattr(usage, name))
        if end > start:
            parts.append(PromptPart(start=start, end=end, source=source))
            start = end
    if start < prompt_tokens:
        detail = "the scheduler no longer knows this request"
        parts.append(PromptPart(start=start, end=prompt_tokens, source="computed", reason="unknown", detail=detail))
    return parts


def admission_of_first_token(known: RecentRequest, figures: Figures) -> Admission | None:
    """Return the admission that the first token came from, or None; before there is a token, the latest."""
    if not figures.workers:
        return known.admissions[-1] if known.admissions and not figures.delivered_ns else None
    first = next(iter(figures.workers))
    return next((attempt for attempt in known.admissions if attempt.attempt == first), None)


def _ms(nanoseconds: int) -> float:
    return round(max(0, nanoseconds) / 1e6, 6)
