"""The plan for a request's prefix: sources, staircase, forms, then pieces and words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.planner.explaining import explain
from bench.planner.groups import Prefix, group_spans
from bench.planner.plan import Method, Piece, Plan
from bench.planner.resources import COMPUTE, Resources
from bench.planner.singles import single_methods
from bench.planner.sources import Cell, choices_of_sources
from bench.planner.spans import Span, all_layers, lowest, ranges
from bench.planner.staircase import Search, Staircase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.planner.assignment import Switch
    from services.scheduler.core.hidden.partition import LayerCosts


def plan_restoration(
    spans: Sequence[Span], costs: LayerCosts, resources: Resources, *, first_layers: bool = True
) -> Plan:
    """The fastest executable way to get a prefix's KV onto the device.

    ``spans`` are the prefix, top first. The time that is minimised is that of the busiest resource: the device's
    computing or a link, with what waits there already. ``first_layers``: whether the worker can compute the first
    layers of tokens alone; otherwise tokens are computed in all layers or in none. Deterministic; O(spans + layers)
    for a bounded number of groups. Raises InvariantViolated for a source without a route.
    """
    prefix = group_spans(spans, costs.layers)
    queued = [resources.queued_us + resources.beside_us, *(link.queued_us for link in resources.links)]
    best: Staircase | None = None
    chosen: list[Cell] = []
    for cells in choices_of_sources(prefix.groups, prefix.before[-1], costs, resources):
        found = Search(prefix, cells, costs, queued, first_layers=first_layers).best(best)
        if found is not best:
            best, chosen = found, cells
    assert best is not None
    pieces = tuple(_pieces(prefix, chosen, costs.layers, best))
    low, high = (prefix.starts[prefix.boundaries[index]] for index in (best.low, best.high))
    names = (COMPUTE, *(link.name for link in resources.links))
    resource_us = tuple(zip(names, best.assignment.loads, strict=True))
    return Plan(
        pieces=pieces,
        row_starts=(low,) * best.layers + (high,) * (costs.layers - best.layers),
        cached_tokens=high,
        predicted_us=best.assignment.time_us,
        resource_us=resource_us,
        single_us=single_methods(prefix, chosen, costs, queued),
        explanations=tuple(explain(pieces, spans, costs, resource_us)),
    )


def _pieces(prefix: Prefix, cells: list[Cell], layers: int, found: Staircase) -> Iterator[Piece]:
    """Every span and layer once; spans that are alike and next to one another share their pieces."""
    low, high = prefix.boundaries[found.low], prefix.boundaries[found.high]
    count = len(prefix.group_of)
    methods = _methods(prefix, cells, layers, found)
    start = 0
    while start < count:
        limit = low if start < low else high if start < high else count
        end = start + 1
        while end < limit and (start >= high or prefix.group_of[end] == prefix.group_of[start]):
            end += 1
        span = (start, end, prefix.starts[start], prefix.starts[end])
        if start >= high:
            yield _piece("tokens", "", span, 0, layers)
        elif start >= low:
            yield _piece("tokens", "", span, 0, found.layers)
            yield from _restored(methods[prefix.group_of[start]], span, found.layers)
        else:
            yield from _restored(methods[prefix.group_of[start]], span, 0)
        start = end


def _restored(methods: list[tuple[Method, str, int]], span: tuple[int, int, int, int], above: int) -> Iterator[Piece]:
    """Pieces of a stretch for layers from ``above`` on."""
    mask = ~all_layers(above)
    found = [(first, end, method, source) for method, source, layers in methods for first, end in ranges(layers & mask)]
    for first, end, method, source in sorted(found):
        yield _piece(method, source, span, first, end)


def _piece(method: Method, source: str, span: tuple[int, int, int, int], first_layer: int, end_layer: int) -> Piece:
    first, end, start_token, end_token = span
    return Piece(
        method=method,
        source=source,
        first_span=first,
        end_span=end,
        start=start_token,
        end=end_token,
        first_layer=first_layer,
        end_layer=end_layer,
    )


def _methods(prefix: Prefix, cells: list[Cell], layers: int, found: Staircase) -> list[list[tuple[Method, str, int]]]:
    """By group: (method, source, layers) wherever it is not computed from tokens."""
    methods: list[list[tuple[Method, str, int]]] = [
        [("device", "", group.device)] if group.device else [] for group in prefix.groups
    ]
    switched: dict[int, int] = {}
    for switch in found.assignment.switches:
        switched[switch.cell] = switched.get(switch.cell, 0) | _hidden_layers(switch)
    for number, cell in enumerate(cells):
        hidden = cell.layers if cell.kv is None else switched.get(number, 0)
        if cell.hidden is not None and hidden:
            methods[cell.group].append(("hidden", cell.hidden.source, hidden))
        if cell.kv is not None and cell.layers & ~hidden:
            methods[cell.group].append(("kv", cell.kv.source, cell.layers & ~hidden))
    return methods


def _hidden_layers(switch: Switch) -> int:
    return lowest(switch.layers, round(switch.hidden))
