"""Plans for whole prefixes, against every executable plan and against what must hold of any."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planner.groups import MOST_GROUPS
from bench.planner.plan import Plan
from bench.planner.planning import plan_restoration
from bench.planner.resources import Resources
from bench.planner.spans import Copy, Span, all_layers, layer_mask
from bench.planner.timeline import timeline_us
from services.scheduler.core.hidden.partition import LayerCosts, best_partition, layer_times
from shared.errors import InvariantViolated
from tests.unit.bench.planner.cases import (
    any_costs,
    any_resources,
    any_span,
    best_by_trying,
    costs,
    held,
    one_layer_us,
    resources,
    rows_us,
)

LAYERS = 3

restorations = st.tuples(st.lists(any_span(LAYERS), min_size=1, max_size=3), any_costs(LAYERS), any_resources())
larger = st.tuples(st.lists(any_span(12), min_size=1, max_size=12), any_costs(12), any_resources())


def loads_of(plan: Plan, spans: list[Span], cost: LayerCosts, resource: Resources) -> list[float]:
    """Microseconds of each resource, added up from a plan's pieces alone."""
    loads = [resource.queued_us + resource.beside_us, *(link.queued_us for link in resource.links)]
    end = sum(span.tokens for span in spans)
    loads[0] += sum(rows_us(plan.row_starts, layer, cost, end) for layer in range(cost.layers))
    for piece in plan.pieces:
        if piece.method in ("kv", "hidden"):
            nbytes = piece.token_layers * (cost.kv_bytes if piece.method == "kv" else cost.hidden_bytes)
            loads[0] += piece.token_layers * cost.hidden_us if piece.method == "hidden" else 0.0
            for place in resource.route(piece.source):
                loads[place + 1] += nbytes / resource.links[place].bytes_per_us
    return loads


@settings(max_examples=60)
@given(restorations)
def test_no_executable_plan_is_faster_by_a_layer(case: tuple[list[Span], LayerCosts, Resources]) -> None:
    """The prediction is a time that some executable plan has, and at most a layer's worth above the least of all."""
    spans, cost, resource = case
    plan = plan_restoration(spans, cost, resource)
    least = best_by_trying(spans, cost, resource)

    assert plan.predicted_us >= least * (1 - 1e-9)
    assert plan.predicted_us <= least + one_layer_us(spans, cost, resource)


@settings(max_examples=60)
@given(st.integers(1, 48), st.integers(1, 500), any_costs(1), st.floats(0.2, 8.0), st.floats(0, 500), st.floats(0, 500))
def test_one_stretch_from_one_source_is_solved_exactly(
    layers: int, tokens: int, cost: LayerCosts, speed: float, waiting_us: float, waiting_bytes: float
) -> None:
    """It is the exact three-way partition, whatever waits on the link and on the device."""
    cost = replace(cost, layers=layers)
    resource = resources(host=speed, queued_us=waiting_us, queued_bytes=waiting_bytes)
    plan = plan_restoration([held(layers, "kv", "hidden", tokens=tokens)], cost, resource)
    times = layer_times(cost, tokens, speed)
    exact = best_partition(layers, times, io_queued=waiting_bytes / speed, queued=waiting_us, ends_early=True)

    assert plan.predicted_us == pytest.approx(exact.time_us)


@settings(max_examples=60)
@given(larger)
def test_a_plan_is_executable_and_costs_what_it_says(case: tuple[list[Span], LayerCosts, Resources]) -> None:
    """Pieces cover everything once from copies that exist, rows never join a pass, and the sums agree."""
    spans, cost, resource = case
    plan = plan_restoration(spans, cost, resource)
    starts = [sum(span.tokens for span in spans[:index]) for index in range(len(spans) + 1)]
    covered: dict[Any, Any] = {}
    for piece in plan.pieces:
        for index in range(piece.first_span, piece.end_span):
            layers = layer_mask(piece.first_layer, piece.end_layer)
            assert not covered.get(index, 0) & layers
            covered[index] = covered.get(index, 0) | layers
            computed = [plan.row_starts[layer] <= starts[index] for layer in range(piece.first_layer, piece.end_layer)]
            assert set(computed) == {piece.method == "tokens"}
            if piece.method == "device":
                assert layers & ~spans[index].device == 0
            elif piece.method != "tokens":
                copies = [c for c in spans[index].copies if (c.source, c.form) == (piece.source, piece.method)]
                assert layers & ~copies[0].layers == 0

    assert covered == dict.fromkeys(range(len(spans)), all_layers(12))
    assert list(plan.row_starts) == sorted(plan.row_starts)
    assert set(plan.row_starts) <= set(starts)
    assert [us for _, us in plan.resource_us] == pytest.approx(loads_of(plan, spans, cost, resource))
    assert plan.predicted_us == pytest.approx(max(us for _, us in plan.resource_us))


@settings(max_examples=60)
@given(larger)
def test_no_single_method_is_faster(case: tuple[list[Span], LayerCosts, Resources]) -> None:
    """A mix is never predicted to take longer than tokens, KV or hidden states alone."""
    spans, cost, resource = case
    plan = plan_restoration(spans, cost, resource)

    assert all(plan.predicted_us <= us * (1 + 1e-9) for _, us in plan.single_us)


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=6), any_costs(12), st.floats(0.2, 4.0), st.floats(1.0, 4.0))
def test_more_bandwidth_never_makes_it_slower(kinds: list[bool], cost: LayerCosts, speed: float, faster: float) -> None:
    """Nor does faster computing: by more than rounding to whole layers can cost."""
    spans = [held(12, "kv", "hidden", source="disk") if both else held(12, "kv") for both in kinds]
    before = plan_restoration(spans, cost, resources(host=speed, disk=speed)).predicted_us
    faster_links = plan_restoration(spans, cost, resources(host=speed * faster, disk=speed * faster)).predicted_us
    faster_device = replace(cost, hidden_us=cost.hidden_us / faster, token_us=cost.token_us / faster)
    slack = sum(span.tokens for span in spans) * (cost.hidden_us + cost.token_us)

    assert faster_links <= before + slack
    assert plan_restoration(spans, faster_device, resources(host=speed, disk=speed)).predicted_us <= before + slack


@settings(max_examples=40)
@given(larger, st.integers(0, 11))
def test_another_copy_never_makes_it_slower_by_a_layer(
    case: tuple[list[Span], LayerCosts, Resources], place: int
) -> None:
    """What can also be read from a neighbour is restored as fast as without."""
    spans, cost, resource = case
    place %= len(spans)
    if any(copy.source == "neighbour" for copy in spans[place].copies) or spans[place].device:
        return
    richer = list(spans)
    richer[place] = replace(
        spans[place], copies=(*spans[place].copies, Copy("neighbour", "kv", all_layers(cost.layers)))
    )
    before = plan_restoration(spans, cost, resource).predicted_us
    slack = one_layer_us(spans, cost, resource)

    assert plan_restoration(richer, cost, resource).predicted_us <= before + slack


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(10, 400), any_costs(1), st.floats(0.2, 8.0))
def test_bubbles_cost_about_one_layer(layers: int, tokens: int, cost: LayerCosts, speed: float) -> None:
    """Layer by layer, with tokens first and KV last, one link and computing wait for each other once."""
    cost, resource = replace(cost, layers=layers), resources(host=speed)
    plan = plan_restoration([held(layers, "kv", "hidden", tokens=tokens)], cost, resource)
    taken = timeline_us(plan, cost, resource, tokens=tokens)
    times = layer_times(cost, tokens, speed)
    pieces = (times.io_kv, times.io_hidden, times.compute_hidden, times.compute_tokens)

    assert plan.predicted_us * (1 - 1e-9) <= taken <= plan.predicted_us + max(pieces)


@settings(max_examples=30)
@given(larger)
def test_the_same_question_has_the_same_answer(case: tuple[list[Span], LayerCosts, Resources]) -> None:
    """Nothing but the arguments decides."""
    assert plan_restoration(*case) == plan_restoration(*case)


def test_what_is_on_the_device_costs_nothing() -> None:
    """A prefix that is there takes no time, and is said to be reused."""
    plan = plan_restoration([Span(tokens=64, device=0b111)], costs(3), resources())

    assert plan.predicted_us == 0
    assert [piece.method for piece in plan.pieces] == ["device"]
    assert plan.cached_tokens == 64


def test_what_exists_nowhere_ends_the_prefix() -> None:
    """Computing the tokens of a span and loading what follows is no pass; both are computed."""
    plan = plan_restoration([held(3, "kv"), Span(tokens=10), held(3, "kv")], costs(3), resources())

    assert plan.cached_tokens == 10
    assert [(piece.method, piece.start, piece.end) for piece in plan.pieces] == [("kv", 0, 10), ("tokens", 10, 30)]


def test_first_layers_that_are_kept_nowhere_are_computed() -> None:
    """As the paper keeps them: eight layers from tokens, forty as hidden states (HCache 6.1.3)."""
    span = Span(tokens=100, copies=(Copy("disk", "hidden", layer_mask(8, 48)),))
    plan = plan_restoration([span], costs(48), resources())
    found = [(piece.method, piece.first_layer, piece.end_layer) for piece in plan.pieces]

    assert found == [("tokens", 0, 8), ("hidden", 8, 48)]
    assert plan.cached_tokens == 100


def test_hidden_states_that_are_larger_than_kv_are_left_alone() -> None:
    """Under grouped queries KV is taken, and the explanation says why."""
    plan = plan_restoration([held(8, "kv", "hidden")], costs(8, kv_bytes=0.5), resources(), first_layers=False)

    assert {piece.method for piece in plan.pieces} == {"kv"}
    assert any("no smaller than KV" in text for text in plan.explanations)


def test_the_first_layer_needs_no_copy() -> None:
    """Its input are the embeddings: projecting them takes no link, which helps wherever the link is the slow side."""
    plan = plan_restoration([held(8, "kv")], costs(8, token_us=1e6), resources())
    without = plan_restoration([held(8, "kv")], costs(8, token_us=1e6), resources(), first_layers=False)

    assert plan.row_starts == (0, *(10,) * 7)
    assert without.row_starts == (10,) * 8
    assert plan.predicted_us < without.predicted_us


def test_a_busy_link_turns_a_plan_to_computing() -> None:
    """The same prefix is loaded over an idle link and computed beside a full one."""
    spans, cost = [held(8, "kv")], costs(8, token_us=4.0)
    idle = plan_restoration(spans, cost, resources())
    busy = plan_restoration(spans, cost, resources(queued_bytes=1e6))
    hopeless = dict(busy.single_us)

    assert idle.predicted_us < dict(idle.single_us)["tokens"]
    assert {piece.method for piece in busy.pieces} == {"tokens"}
    assert hopeless["tokens"] < hopeless["kv"]


def test_two_sources_of_the_same_share_it() -> None:
    """Layers are dealt out so that the host link and the wire are done together."""
    span = Span(tokens=10, copies=(Copy("host", "kv", all_layers(12)), Copy("neighbour", "kv", all_layers(12))))
    plan = plan_restoration([span], costs(12), resources(host=2.0, wire=4.0), first_layers=False)

    assert dict(plan.resource_us)["host link"] == dict(plan.resource_us)["wire"] == 40


def test_what_one_switch_makes_busy_another_relieves() -> None:
    """The wire is relieved by hidden states from disk, and the disk by those of another span from the host."""
    cost = costs(6, kv_bytes=1.0, hidden_us=0.05, token_us=7.0, pair_us=0.1)
    link = resources(host=8.0, disk=3.75, wire=1.2)
    spans = [
        Span(tokens=19, copies=(Copy("host", "hidden", all_layers(6)), Copy("disk", "kv", all_layers(6)))),
        Span(tokens=22, copies=(Copy("disk", "hidden", all_layers(6)), Copy("neighbour", "kv", all_layers(6)))),
    ]
    plan = plan_restoration(spans, cost, link)

    assert plan.predicted_us <= best_by_trying(spans, cost, link) * 1.1


def test_layers_that_are_on_the_device_are_not_brought_again() -> None:
    """Of a span that lost its upper layers only these are loaded, from copies that may come in parts."""
    span = Span(tokens=10, device=0b0011, copies=(Copy("host", "kv", 0b0110), Copy("host", "kv", 0b1000)))
    plan = plan_restoration([span], costs(4), resources(), first_layers=False)
    found = [(piece.method, piece.first_layer, piece.end_layer) for piece in plan.pieces]

    assert found == [("device", 0, 2), ("kv", 2, 4)]
    assert dict(plan.resource_us)["host link"] == 20


def test_a_route_over_two_links_takes_time_of_both() -> None:
    """What comes from disk passes the host link, too."""
    spans, link = [held(4, "kv", source="disk")], resources(host=2.0, disk=1.0)
    plan = plan_restoration(spans, costs(4), link, first_layers=False)

    assert dict(plan.resource_us) == {"compute": 0, "host link": 40, "disk": 80, "wire": 0}


def test_new_tokens_that_are_computed_beside_count() -> None:
    """Work that hides loads is part of computing: fewer layers are made from hidden states."""
    spans, cost = [held(8, "kv", "hidden")], costs(8, token_us=100.0)
    alone = plan_restoration(spans, cost, resources())
    beside = plan_restoration(spans, cost, replace(resources(), beside_us=60.0))

    def hidden(plan: Plan) -> int:
        return sum(piece.token_layers for piece in plan.pieces if piece.method == "hidden")

    assert hidden(beside) < hidden(alone)


def test_many_different_spans_still_have_a_plan() -> None:
    """More groups than are weighed take one form each; it is no worse than any single method."""
    spans = [
        Span(tokens=5 + n, copies=(Copy("disk", "hidden", 0b1111), Copy("disk", "kv", 0b1111), Copy("host", "kv", n)))
        for n in range(MOST_GROUPS * 2 - 1)
    ]
    plan = plan_restoration(spans, costs(4), resources())

    assert sum(piece.token_layers for piece in plan.pieces) == 4 * sum(span.tokens for span in spans)
    assert all(plan.predicted_us <= us * (1 + 1e-9) for _, us in plan.single_us)


def test_an_empty_prefix_takes_no_time() -> None:
    """Nothing is planned for nothing."""
    plan = plan_restoration([], costs(3), resources())

    assert (plan.pieces, plan.predicted_us, plan.cached_tokens) == ((), 0, 0)


def test_a_source_without_a_route_is_an_error() -> None:
    """A copy that no link leads to is the caller's mistake."""
    with pytest.raises(InvariantViolated, match="tape"):
        plan_restoration([held(3, "kv", source="tape")], costs(3), resources())
