"""A plan executed layer by layer in virtual time: what it takes with bubbles, on links that serve in order.

Links bring layer after layer, hidden states before KV within one; a copy that passes several links goes on as it
arrives. The device goes through the layers once: it projects a layer's hidden states when they are there, and those of
rows that end with the layer, and computes the other rows when all KV of the layer is there, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.planner.plan import Plan
    from bench.planner.resources import Resources
    from bench.planner.spans import Form
    from services.scheduler.core.hidden.partition import LayerCosts


def timeline_us(plan: Plan, costs: LayerCosts, resources: Resources, *, tokens: int) -> float:
    """When the last layer of a prefix of ``tokens`` tokens is restored, and what runs beside it is computed."""
    links = [link.queued_us for link in resources.links]
    now = resources.queued_us
    beside_us = resources.beside_us / costs.layers
    restored = now
    for layer in range(costs.layers):
        hidden_tokens, hidden_there = _arrive(plan, costs, resources, links, layer, "hidden")
        _, kv_there = _arrive(plan, costs, resources, links, layer, "kv")
        restored = max(restored, hidden_there, kv_there)
        if hidden_tokens:
            now = max(now, hidden_there) + hidden_tokens * costs.hidden_us
        going_on = plan.row_starts[min(layer + 1, costs.layers - 1)]
        now += (going_on - plan.row_starts[layer]) * costs.hidden_us
        rows_us = costs.recompute_us(going_on, tokens) + beside_us
        if rows_us:
            now = max(now, kv_there) + rows_us
    return max(now, restored)


def _arrive(
    plan: Plan, costs: LayerCosts, resources: Resources, links: list[float], layer: int, form: Form
) -> tuple[int, float]:
    """(Tokens of a layer that come in this form, when the last of them are there). Moves the links on."""
    there, tokens = 0.0, 0
    nbytes = costs.kv_bytes if form == "kv" else costs.hidden_bytes
    for piece in plan.pieces:
        if piece.method != form or not piece.first_layer <= layer < piece.end_layer:
            continue
        tokens += piece.end - piece.start
        for place in resources.route(piece.source):
            links[place] += (piece.end - piece.start) * nbytes / resources.links[place].bytes_per_us
            there = max(there, links[place])
    return tokens, there
