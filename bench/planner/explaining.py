"""A plan in words: one sentence a piece, with what it costs and why nothing else was taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.planner.spans import Form, Span, layer_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.planner.plan import Piece
    from services.scheduler.core.hidden.partition import LayerCosts

_US_PER_MS = 1e3


def explain(
    pieces: Sequence[Piece], spans: Sequence[Span], costs: LayerCosts, resource_us: Sequence[tuple[str, float]]
) -> Iterator[str]:
    """First which resource takes longest, then each piece."""
    busiest, longest = max(resource_us, key=lambda one: one[1])
    yield f"{busiest} takes longest, {longest / _US_PER_MS:.2f} ms"
    for piece in pieces:
        place = f"tokens {piece.start}-{piece.end}, layers {piece.first_layer}-{piece.end_layer}: "
        yield place + _why(piece, spans[piece.first_span], costs, busiest)


def _why(piece: Piece, span: Span, costs: LayerCosts, busiest: str) -> str:
    if piece.method == "device":
        return "reused, they are on the device"
    if piece.method == "tokens":
        return _why_tokens(piece, span, costs)
    layers = layer_mask(piece.first_layer, piece.end_layer)
    if piece.method == "hidden":
        size = f"{piece.token_layers * costs.hidden_bytes / 1e6:.1f} MB"
        made = f"{piece.token_layers * costs.hidden_us / _US_PER_MS:.2f} ms of projection"
        if not _held(span, "kv", layers):
            return f"hidden states from {piece.source} ({size}, {made}), nothing else is kept"
        part = costs.hidden_bytes / costs.kv_bytes
        return f"hidden states from {piece.source} ({size}, {made}), {part:.2f} of the bytes of KV"
    size = f"{piece.token_layers * costs.kv_bytes / 1e6:.1f} MB"
    if not _held(span, "hidden", layers):
        return f"KV from {piece.source} ({size}), no hidden states are kept"
    if not costs.hidden_is_smaller:
        return f"KV from {piece.source} ({size}), hidden states are no smaller than KV in this model"
    return f"KV from {piece.source} ({size}), copied while {busiest} is busy and without computing"


def _why_tokens(piece: Piece, span: Span, costs: LayerCosts) -> str:
    each = costs.recompute_us(piece.start, piece.end) * (piece.end_layer - piece.first_layer)
    if piece.end_layer < costs.layers:
        each -= costs.recompute_us(piece.start, piece.end) - (piece.end - piece.start) * costs.hidden_us
    layers = layer_mask(piece.first_layer, piece.end_layer)
    held = span.device
    for copy in span.copies:
        held |= copy.layers
    if not held & layers:
        reason = "nothing is kept of them"
    elif layers & ~held:
        reason = "some of these layers are kept nowhere"
    elif piece.end_layer < costs.layers:
        reason = "while copies of later layers arrive"
    else:
        reason = "sooner done than any copy arrives"
    return f"computed from tokens ({each / _US_PER_MS:.2f} ms), {reason}"


def _held(span: Span, form: Form, layers: int) -> bool:
    """Whether any of these layers exists in a form."""
    return any(copy.form == form and copy.layers & layers for copy in span.copies)
