"""Small restorations drawn by hypothesis, and the best plan for each found by trying every executable one."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

from hypothesis import strategies as st

from bench.planner.resources import Link, Resources
from bench.planner.spans import Copy, Span, all_layers, layer_mask
from services.scheduler.core.hidden.partition import LayerCosts

ROUTES = {"host": ("host link",), "disk": ("disk", "host link"), "neighbour": ("wire",)}


def resources(
    host: float = 2.0, disk: float = 1.0, wire: float = 4.0, *, queued_us: float = 0.0, queued_bytes: float = 0.0
) -> Resources:
    """A host link, a disk behind it and a wire to a neighbour, in bytes a microsecond."""
    links = (
        Link(name="host link", bytes_per_us=host, queued_bytes=queued_bytes),
        Link(name="disk", bytes_per_us=disk),
        Link(name="wire", bytes_per_us=wire),
    )
    return Resources(links=links, routes=ROUTES, queued_us=queued_us)


def costs(
    layers: int,
    *,
    kv_bytes: float = 2.0,
    hidden_bytes: float = 1.0,
    hidden_us: float = 0.5,
    token_us: float = 3.0,
    pair_us: float = 0.0,
) -> LayerCosts:
    """Costs of a layer, as in multi-head attention unless said otherwise."""
    return LayerCosts(
        layers=layers,
        kv_bytes=kv_bytes,
        hidden_bytes=hidden_bytes,
        hidden_us=hidden_us,
        token_us=token_us,
        pair_us=pair_us,
    )


def held(layers: int, *forms: Any, tokens: int = 10, source: str = "host") -> Span:
    """A span of which every layer is held in these forms."""
    return Span(tokens=tokens, copies=tuple(Copy(source, form, all_layers(layers)) for form in forms))


@st.composite
def any_costs(draw: Callable[..., Any], layers: int) -> LayerCosts:
    speed = st.floats(0.05, 4.0)
    return costs(
        layers,
        kv_bytes=draw(st.sampled_from([0.5, 1.0, 2.0])),
        hidden_us=draw(speed),
        token_us=draw(st.floats(0.1, 12.0)),
        pair_us=draw(st.sampled_from([0.0, 0.01, 0.1])),
    )


@st.composite
def any_resources(draw: Callable[..., Any]) -> Resources:
    speed = st.floats(0.2, 8.0)
    queue = st.sampled_from([0.0, 0.0, 20.0])
    return resources(draw(speed), draw(speed), draw(speed), queued_us=draw(queue), queued_bytes=draw(queue))


@st.composite
def any_span(draw: Callable[..., Any], layers: int, *, device_too: bool = True) -> Span:
    """A span with up to two copies, each of all layers or of those from one on."""
    tokens = draw(st.integers(1, 40))
    if device_too and draw(st.integers(0, 5)) == 0:
        return Span(tokens=tokens, device=all_layers(layers))
    pairs = st.tuples(st.sampled_from(list(ROUTES)), st.sampled_from(["kv", "hidden"]), st.sampled_from([0, 0, 1]))
    copies = draw(st.lists(pairs, max_size=2, unique_by=lambda one: one[:2]))
    return Span(tokens=tokens, copies=tuple(Copy(a, form, layer_mask(start, layers)) for a, form, start in copies))


def best_by_trying(spans: list[Span], cost: LayerCosts, resource: Resources) -> float:
    """The least time of the busiest resource over every staircase and every form and source of each span and layer."""
    count, end = len(spans), sum(span.tokens for span in spans)
    starts = [sum(span.tokens for span in spans[:index]) for index in range(count + 1)]
    best = float("inf")
    for rows in product(range(count + 1), repeat=cost.layers):
        if any(later < earlier for earlier, later in pairwise(rows)):
            continue
        base = [resource.queued_us, *(link.queued_us for link in resource.links)]
        base[0] += sum(rows_us([starts[row] for row in rows], layer, cost, end) for layer in range(cost.layers))
        options = [
            options_of(spans[index], layer, cost, resource)
            for layer, row in enumerate(rows)
            for index in range(row)
            if not spans[index].device >> layer & 1
        ]
        best = min([best, *(time_of(base, chosen) for chosen in product(*options))])
    return best


def rows_us(row_starts: Sequence[int], layer: int, cost: LayerCosts, end: int) -> float:
    """Computing at a layer: rows that go on to the next one in full, the others' keys and values alone."""
    going_on = row_starts[min(layer + 1, cost.layers - 1)]
    return cost.recompute_us(going_on, end) + (going_on - row_starts[layer]) * cost.hidden_us


def options_of(span: Span, layer: int, cost: LayerCosts, resource: Resources) -> list[list[tuple[int, float]]]:
    """(Resource, microseconds) pairs of each way to restore a layer of a span from a copy."""
    found = []
    for copy in span.copies:
        if copy.layers >> layer & 1:
            nbytes = span.tokens * (cost.kv_bytes if copy.form == "kv" else cost.hidden_bytes)
            us = [(place + 1, nbytes / resource.links[place].bytes_per_us) for place in resource.route(copy.source)]
            found.append(us if copy.form == "kv" else [(0, span.tokens * cost.hidden_us), *us])
    return found


def time_of(base: list[float], chosen: tuple[list[tuple[int, float]], ...]) -> float:
    loads = list(base)
    for one in chosen:
        for place, us in one:
            loads[place] += us
    return max(loads)


def one_layer_us(spans: list[Span], cost: LayerCosts, resource: Resources) -> float:
    """The most that one layer of the whole prefix takes of any resource, whatever way it is restored."""
    tokens = sum(span.tokens for span in spans)
    slowest = min(link.bytes_per_us for link in resource.links)
    most_bytes = max(cost.kv_bytes, cost.hidden_bytes)
    return max(tokens * most_bytes / slowest, cost.recompute_us(0, tokens) + tokens * cost.hidden_us)
