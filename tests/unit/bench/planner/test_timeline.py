"""Plans executed layer by layer."""

from dataclasses import replace

import pytest

from bench.planner.planning import plan_restoration
from bench.planner.spans import Copy, Span, layer_mask
from bench.planner.timeline import timeline_us
from tests.unit.bench.planner.cases import costs, held, resources


def test_loading_alone_has_no_bubble() -> None:
    """KV that nothing is computed beside takes its bytes."""
    cost, resource = costs(4, token_us=1e6), resources(host=2.0)
    plan = plan_restoration([held(4, "kv")], cost, resource, first_layers=False)

    assert timeline_us(plan, cost, resource, tokens=10) == plan.predicted_us == 40


def test_the_last_layer_is_projected_after_it_arrives() -> None:
    """Four layers of 10 us on the link, then 4 us of projection for the last."""
    cost, resource = costs(4, hidden_us=0.4, token_us=1e6), resources(host=1.0)
    plan = plan_restoration([held(4, "hidden")], cost, resource, first_layers=False)

    assert plan.predicted_us == 40
    assert timeline_us(plan, cost, resource, tokens=10) == pytest.approx(44)


def test_first_layers_are_computed_while_others_arrive() -> None:
    """One layer in full and the projection of the next hide the hidden states of two more, projected afterwards."""
    cost, resource = costs(4, hidden_us=0.5), resources(host=1.0)
    span = Span(tokens=10, copies=(Copy("host", "hidden", layer_mask(2, 4)),))
    plan = plan_restoration([span], cost, resource)

    assert plan.row_starts == (0, 0, 10, 10)
    assert timeline_us(plan, cost, resource, tokens=10) == pytest.approx(30 + 5 + 5 + 5)


def test_a_suffix_waits_for_what_it_attends_to() -> None:
    """Rows at a layer begin when the KV before them is there at that layer, and overlap with the next layers' loads."""
    cost, resource = costs(4, token_us=1.9), resources(host=1.0)
    plan = plan_restoration([held(4, "kv"), Span(tokens=10)], cost, resource)

    # Each layer brings 20 bytes in 20 us and is computed in 19.
    assert plan.row_starts == (10, 10, 10, 10)
    assert timeline_us(plan, cost, resource, tokens=20) == pytest.approx(99)


def test_queues_come_first() -> None:
    """What waits on the link and on the device is done before."""
    cost = costs(4, hidden_us=0.4, token_us=1e6)
    resource = resources(host=1.0, queued_us=100.0, queued_bytes=30.0)
    plan = plan_restoration([held(4, "hidden")], cost, resource, first_layers=False)

    assert timeline_us(plan, cost, resource, tokens=10) == pytest.approx(100 + 16)


def test_new_tokens_are_computed_beside_layer_by_layer() -> None:
    """Their time is hidden behind loads but for the last layer's."""
    cost = costs(4, token_us=1e6)
    resource = replace(resources(host=2.0), beside_us=8.0)
    plan = plan_restoration([held(4, "kv")], cost, resource, first_layers=False)

    assert timeline_us(plan, cost, resource, tokens=10) == pytest.approx(42)
