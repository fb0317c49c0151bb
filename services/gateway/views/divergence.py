"""The report of a divergence point in text, limited to what its reader may see. Pure.

Another caller may have sent the cached side. The admin key, and a tenant with a cache of its own, see everything.
Others see their own prompt, in whole pages: a place that is exact to the token, or the number of tokens that both sides
have behind it, would let them guess other callers' prompts one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.divergence_causes import cause_of
from services.gateway.openai_schema.explanation import Cause, CostlyDivergence, CostlyDivergences, Divergence
from services.gateway.prompt_places import Place
from shared.ids import TOKEN_BYTES
from shared.messages.base import unpack_int32
from shared.messages.explanations import CostlyPoint, DivergencePoint, Divergences

CONTEXT_CHARACTERS = 40

Decode = Callable[[Sequence[int]], str]


def divergence_view(
    point: DivergencePoint, prompt_tokens: int, place: Place | None, decode: Decode, *, sees_cache: bool
) -> Divergence:
    """Return the report of the point at which a prompt of so many tokens left the cache."""
    if not sees_cache:
        point = to_the_page(point, prompt_tokens)
    before, prompt, cached = texts_of(point, decode)
    is_told = point.kind in ("diverged", "evicted")
    cause: Cause | None = None
    if point.kind == "diverged":
        cause = cause_of(before, prompt, cached if sees_cache else None, place)
    return Divergence(
        kind=point.kind,
        token=None if point.kind == "opted_out" else point.position,
        part=None if place is None else place.part,
        message=None if place is None else place.message,
        role=None if place is None else place.role,
        before=before[-CONTEXT_CHARACTERS:] if is_told else None,
        prompt=prompt[:CONTEXT_CHARACTERS] if is_told else None,
        cached=cached[:CONTEXT_CHARACTERS] if sees_cache and point.kind == "diverged" else None,
        cause=cause,
        lost_tokens=point.lost_tokens if sees_cache or point.kind != "diverged" else None,
        lost_ms=point.lost_us / 1000 if point.lost_us else None,
    )


def divergences_view(found: Divergences, decode: Decode | None) -> CostlyDivergences:
    """Return the costliest points of a cell, for its operators."""
    return CostlyDivergences(
        data=[_costly(costly, decode) for costly in found.points],
        since_ms=found.since_ns // 1_000_000 if found.since_ns else None,
    )


def _costly(costly: CostlyPoint, decode: Decode | None) -> CostlyDivergence:
    """Return the report of a divergence point of the cell; without ``decode``, without texts and cause."""
    point = costly.point
    before, prompt, cached = ("", "", "") if decode is None else texts_of(point, decode)
    return CostlyDivergence(
        namespace=costly.namespace,
        token=point.position,
        before=before[-CONTEXT_CHARACTERS:] if decode is not None else None,
        prompt=prompt[:CONTEXT_CHARACTERS] if decode is not None else None,
        cached=cached[:CONTEXT_CHARACTERS] if decode is not None else None,
        cause=None if decode is None else cause_of(before, prompt, cached, None),
        requests=costly.requests,
        lost_tokens=costly.lost_tokens,
        error_tokens=costly.error_tokens,
        lost_ms=costly.lost_us / 1000 if costly.lost_us else None,
        request_id=costly.request_id,
        last_ms=costly.at_ns // 1_000_000,
    )


def to_the_page(point: DivergencePoint, prompt_tokens: int) -> DivergencePoint:
    """Return the point in whole pages, which the sizes of cached pages reveal anyway: no field is finer than a page."""
    if point.kind not in ("diverged", "continued"):
        return point
    shared = (point.position - point.page_start) * TOKEN_BYTES
    whole = len(point.before) - shared
    ends_here = prompt_tokens - point.page_start <= point.page_size
    return DivergencePoint(
        kind="continued" if ends_here else point.kind,
        position=point.page_start,
        page_start=point.page_start,
        page_size=point.page_size,
        before=point.before[:whole],
        prompt=point.before[whole:] + point.prompt,
    )


def texts_of(point: DivergencePoint, decode: Decode) -> tuple[str, str, str]:
    """Return the text before the point, the prompt's text behind it, and the cached text behind it.

    A character whose first bytes both sides have, and not its last, is whole in each.
    """
    common = unpack_int32(point.before)
    before = decode(common).rstrip("\ufffd")
    sides = []
    for side in (point.prompt, point.cached):
        text = decode([*common, *unpack_int32(side)]) if side else before
        sides.append(text[len(before) :].rstrip("\ufffd") if text.startswith(before) else decode(unpack_int32(side)))
    return before.lstrip("\ufffd"), sides[0], sides[1]
