"""How heads and rows divide among ranks."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from services.worker.parallel.division import Share, check_divisible, config_of_rank
from shared.errors import ConfigError


def config(**changes: int) -> LlamaConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    return LlamaConfig(**(shape | changes))


def test_kv_heads_are_divided_and_repeated_where_ranks_are_more() -> None:
    """Two of four heads each; with eight ranks, neighbours have the same head."""
    assert [Share(rank, 2).kv_heads(4) for rank in range(2)] == [range(2), range(2, 4)]
    assert [Share(rank, 8).kv_heads(4).start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_every_query_head_finds_its_kv_head_in_its_rank() -> None:
    """Whatever the number of ranks, the KV head that a query head reads is one of its rank's."""
    heads, kv_heads = 8, 4
    for ranks in (1, 2, 4, 8):
        for head in range(heads):
            mine = Share(head * ranks // heads, ranks).kv_heads(kv_heads)
            assert head * kv_heads // heads in mine


def test_a_rank_has_its_rows_of_a_weight() -> None:
    """A third of nine rows; a repeated KV head; and nothing that neither explains."""
    assert Share(1, 3).rows(9, 3, kv_heads=3, head_dim=1) == range(3, 6)
    assert Share(3, 4).rows(16, 8, kv_heads=2, head_dim=8) == range(8, 16)
    assert Share(0, 2).rows(9, 4, kv_heads=2, head_dim=8) is None


def test_everything_that_does_not_divide_is_named_at_once() -> None:
    """Heads, KV heads and the intermediate size."""
    with pytest.raises(ConfigError, match="8 attention heads, 4 KV heads") as refused:
        check_divisible(config(intermediate_size=100), 3)

    assert "intermediate_size = 100" in refused.value.message


def test_a_ranks_model_has_heads_as_wide_as_the_whole_ones() -> None:
    """Heads become fewer, not narrower, and the whole configuration stays as it is."""
    whole = config()
    mine = config_of_rank(whole, 2)

    assert (mine.num_attention_heads, mine.num_key_value_heads, mine.head_dim, mine.intermediate_size) == (4, 2, 8, 48)
    assert (whole.num_attention_heads, whole.intermediate_size) == (8, 96)
