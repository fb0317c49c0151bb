"""Layers by method for one stretch and one source (HCache 4.1)."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.hidden.partition import (
    LayerTimes,
    best_partition,
    best_two_way,
    closed_form,
    hidden_only,
    kv_only,
    layer_times,
    made,
    naive_hybrid,
    token_wise,
    tokens_only,
)
from tests.unit.scheduler.core.hidden.layer_costs import costs

times = st.builds(
    LayerTimes,
    io_kv=st.floats(0.1, 10),
    io_hidden=st.floats(0.1, 10),
    compute_hidden=st.floats(0.1, 10),
    compute_tokens=st.floats(0.1, 60),
)


def paper_times(compute_hidden: float, io_hidden: float) -> LayerTimes:
    """As in multi-head attention: KV twice the bytes, tokens six times the work."""
    return LayerTimes(
        io_kv=2 * io_hidden, io_hidden=io_hidden, compute_hidden=compute_hidden, compute_tokens=6 * compute_hidden
    )


@settings(max_examples=200)
@given(st.integers(1, 12), times, st.floats(0, 30), st.floats(0, 30))
def test_the_three_way_partition_is_the_least_of_all(
    layers: int, layer: LayerTimes, io_queued: float, queued: float
) -> None:
    """No other whole numbers of layers take less."""
    every = (
        made(layer, tokens=tokens, hidden=hidden, kv=layers - tokens - hidden, io_queued=io_queued, queued=queued)
        for tokens, hidden in product(range(layers + 1), repeat=2)
        if tokens + hidden <= layers
    )

    found = best_partition(layers, layer, io_queued=io_queued, queued=queued)
    assert found.time_us == pytest.approx(min(one.time_us for one in every))
    assert found.tokens + found.hidden + found.kv == layers


@settings(max_examples=200)
@given(st.integers(1, 80), times)
def test_no_baseline_is_faster(layers: int, layer: LayerTimes) -> None:
    """Neither one method alone, nor the naive hybrid, nor two ways, nor the paper's formula."""
    others = [kv_only, hidden_only, tokens_only, naive_hybrid, best_two_way, closed_form]

    best = best_partition(layers, layer).time_us
    assert all(best <= other(layers, layer).time_us * (1 + 1e-9) for other in others)


@settings(max_examples=200)
@given(st.integers(1, 80), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_papers_formula_is_within_a_layer_of_the_best_two(
    layers: int, compute_hidden: float, io_hidden: float
) -> None:
    """Under its premises rounding up costs at most what a layer takes."""
    layer = paper_times(compute_hidden, io_hidden)

    gap = closed_form(layers, layer).time_us - best_two_way(layers, layer).time_us
    assert -1e-9 <= gap <= max(compute_hidden, io_hidden) + 1e-9


def test_slow_computing_adds_kv_and_slow_loading_adds_tokens() -> None:
    """Which other method fills the bubble follows from which side is slower (HCache 4.1.2)."""
    slow_device = closed_form(32, paper_times(1.1, 1.0))
    slow_link = closed_form(40, paper_times(1.0, 2.0))

    # ceil(32 * 2 / 2.1) and ceil(40 * 6 / 7).
    assert (slow_device.hidden, slow_device.kv, slow_device.tokens) == (31, 1, 0)
    assert (slow_link.hidden, slow_link.kv, slow_link.tokens) == (35, 0, 5)


def test_both_sides_finish_together() -> None:
    """Nothing waits for longer than a layer takes."""
    found = best_partition(48, paper_times(1.0, 2.0))

    assert abs(found.io_us - found.compute_us) <= 6.0
    assert found.time_us < hidden_only(48, paper_times(1.0, 2.0)).time_us


def test_hidden_states_as_large_as_kv_are_never_used() -> None:
    """They would only add computing."""
    layer = LayerTimes(io_kv=1.0, io_hidden=1.0, compute_hidden=0.1, compute_tokens=2.0)
    found = best_partition(32, layer)

    assert found.hidden == 0
    assert found.kv > found.tokens > 0


def test_layer_times_follow_the_costs() -> None:
    """Bytes over the link's speed; tokens with the attention that their context takes."""
    layer = layer_times(costs(1, pair_us=0.1), 10, 2.0, context=5)

    assert (layer.io_kv, layer.io_hidden, layer.compute_hidden) == (10, 5, 5)
    assert layer.compute_tokens == pytest.approx(30 + 0.1 * (15 * 15 - 5 * 5) / 2)


@pytest.mark.parametrize(("hidden_us", "others"), [(0.2, "tokens"), (2.0, "kv")])
def test_a_token_wise_partition_balances_every_layer(hidden_us: float, others: str) -> None:
    """Tokens from hidden states, and the others by what is idle, with equal times on both sides (HCache 4.1.1)."""
    cost = costs(4, hidden_us=hidden_us)
    found = token_wise(cost, 1000, 1.0)
    left = found.tokens if others == "tokens" else found.kv
    io = found.hidden + 2 * found.kv
    computing = found.hidden * hidden_us + found.tokens * 3.0

    assert left == 1000 - found.hidden > 0
    assert io == pytest.approx(computing, abs=4)


def test_a_token_wise_partition_can_be_rounded() -> None:
    """Hidden states of multiples of 64 tokens only."""
    found = token_wise(costs(4, hidden_us=0.2), 1000, 1.0, multiple=64)

    assert found.hidden % 64 == 0
    assert found.hidden + found.tokens + found.kv == 1000
