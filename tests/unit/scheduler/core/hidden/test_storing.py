"""Which form is worth keeping."""

from dataclasses import replace

from services.scheduler.core.hidden.partition import worth_storing
from tests.unit.scheduler.core.hidden.layer_costs import costs

WIDTH = 4096
FLOP_PER_US, PAIR_FLOP_PER_US = 190e6, 125e6

PAPER = costs(
    32,
    kv_bytes=4 * WIDTH,
    hidden_bytes=2 * WIDTH,
    hidden_us=4 * WIDTH**2 / FLOP_PER_US,
    token_us=24 * WIDTH**2 / FLOP_PER_US,
    pair_us=4 * WIDTH / PAIR_FLOP_PER_US,
)
"""Multi-head attention in bfloat16, by the formulas of HCache 3.2."""

GROUPED = replace(PAPER, kv_bytes=WIDTH, hidden_us=WIDTH**2 / FLOP_PER_US, token_us=2 * 218_112_000 / FLOP_PER_US)
"""Llama-3.1-8B: a quarter of the KV heads."""


def test_multi_head_attention_keeps_hidden_states() -> None:
    """A device and a link like the paper's keep most layers as hidden states, at about half the bytes (Table 3)."""
    found = worth_storing(PAPER, tokens=2000, bytes_per_us=24_000)

    assert found.form in ("hidden", "mix")
    assert found.partition.hidden >= 28
    assert 1.8 < found.kv_token_bytes / found.token_bytes < 2.4


def test_grouped_queries_keep_kv() -> None:
    """Where a hidden state is larger it is not kept, and the explanation says so."""
    found = worth_storing(GROUPED, tokens=2000, bytes_per_us=24_000)

    assert found.form == "kv"
    assert "2.0 times the bytes" in found.explanation


def test_a_hopeless_link_keeps_nothing() -> None:
    """Where computing is about as fast as the best mix, no copy is worth its room."""
    found = worth_storing(costs(32, token_us=0.1, hidden_us=0.09), tokens=100, bytes_per_us=0.01)

    assert (found.form, found.token_bytes) == ("nothing", 0)
    assert found.partition.tokens == 32


def test_a_slow_device_keeps_a_mix() -> None:
    """Some layers as KV where projecting all would take longer than the link."""
    found = worth_storing(costs(32, hidden_us=1.5, token_us=50.0), tokens=100, bytes_per_us=1.0)

    assert found.form == "mix"
    assert found.partition.hidden
    assert found.partition.kv
    assert found.token_bytes == found.partition.hidden * 1.0 + found.partition.kv * 2.0


def test_a_worker_that_cannot_project_keeps_kv() -> None:
    """Whatever hidden states would save, none are kept."""
    found = worth_storing(PAPER, tokens=2000, bytes_per_us=24_000, may_keep_hidden=False)

    assert found.form == "kv"
    assert "restores nothing from hidden states" in found.explanation


def test_first_layers_may_be_kept_nowhere() -> None:
    """On a slow link the first layers are computed, which takes no room at all (HCache 6.1.3)."""
    found = worth_storing(replace(PAPER, layers=48), tokens=1000, bytes_per_us=6_900)

    assert found.partition.tokens > 0
    assert found.kv_token_bytes / found.token_bytes > 2
