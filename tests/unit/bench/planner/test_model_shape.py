"""Costs of a layer, by formula and by measurement."""

import pytest

from bench.planner.model_shape import ModelShape, costs_of_shape

WIDTH = 4096
PAPER = ModelShape(
    layers=32, hidden=WIDTH, heads=32, kv_heads=32, head_dim=128, layer_parameters=12 * WIDTH**2, dtype_bytes=2
)
GROUPED = ModelShape(
    layers=32, hidden=WIDTH, heads=32, kv_heads=8, head_dim=128, layer_parameters=218_112_000, dtype_bytes=2
)


def test_the_papers_formulas_are_the_special_case() -> None:
    """4 N D² from hidden states, 24 N D² and 2 N² D from tokens, half the bytes (HCache 3.2)."""
    costs = costs_of_shape(PAPER, product_flops=1e6, attention_flops=1e6)
    tokens = 1000

    assert tokens * costs.hidden_us == pytest.approx(4 * tokens * WIDTH**2)
    assert costs.recompute_us(0, tokens) == pytest.approx(24 * tokens * WIDTH**2 + 2 * tokens**2 * WIDTH)
    assert costs.hidden_bytes * 2 == costs.kv_bytes


def test_restoring_from_hidden_states_is_at_least_six_times_as_fast() -> None:
    """And the more so the longer the sequence, since attention is left out (HCache 3.2)."""
    costs = costs_of_shape(PAPER, product_flops=1e12, attention_flops=1e12)
    speedups = [costs.recompute_us(0, tokens) / (tokens * costs.hidden_us) for tokens in (1, 1000, 16_000)]

    assert speedups[0] == pytest.approx(6, rel=1e-3)
    assert speedups == sorted(speedups)


def test_grouped_queries_make_hidden_states_larger_than_kv() -> None:
    """Llama-3.1-8B keeps a quarter of the heads' KV: twice as many bytes in hidden states."""
    costs = costs_of_shape(GROUPED, product_flops=1e12, attention_flops=1e12)

    assert costs.hidden_bytes == 2 * costs.kv_bytes
    assert not costs.hidden_is_smaller


def test_recomputing_adds_up() -> None:
    """Two stretches cost what the whole does."""
    costs = costs_of_shape(PAPER, product_flops=1e12, attention_flops=1e11)

    assert costs.recompute_us(0, 700) + costs.recompute_us(700, 1000) == pytest.approx(costs.recompute_us(0, 1000))
