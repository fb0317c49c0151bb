"""How heads and rows divide among ranks."""

from __future__ import annotations

import pytest
from transformers import Gemma4TextConfig, LlamaConfig, MambaConfig, MiMoV2FlashConfig

from services.worker.parallel.division import (
    Share,
    check_divisible,
    config_of_rank,
    kv_heads_by_layer,
    layer_configs,
)
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
    assert Share(1, 3).rows(9, 3, kv_heads=3) == range(3, 6)
    assert Share(3, 4).rows(16, 8, kv_heads=2) == range(8, 16)
    assert Share(0, 2).rows(9, 4, kv_heads=2) is None


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


def uneven() -> Gemma4TextConfig:
    """Every second layer has other heads."""
    return Gemma4TextConfig(
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        head_dim=16,
        global_head_dim=32,
        intermediate_size=96,
        layer_types=["sliding_attention", "full_attention"],
    )


def test_layers_that_differ_are_divided_each_by_its_own_sizes() -> None:
    """Two ranks have half the heads of each, as wide as before; the whole configuration stays as it is."""
    whole = uneven()
    mine = config_of_rank(whole, 2)

    sizes = [(layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) for layer in layer_configs(mine)]
    assert sizes == [(4, 2, 16), (4, 1, 32)]
    assert mine.intermediate_size == 48
    assert kv_heads_by_layer(whole) == (4, 2)


def test_every_layer_has_to_divide() -> None:
    """What one layer has in the way is named once."""
    with pytest.raises(ConfigError, match="has 6 KV heads, which"):
        check_divisible(Gemma4TextConfig(num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=6), 4)


def test_layers_whose_code_doubles_heads_are_known() -> None:
    """Those with a window of MiMo V2."""
    whole = MiMoV2FlashConfig(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])

    assert kv_heads_by_layer(whole) == (4, 8)


def test_a_model_without_heads_is_refused_by_name() -> None:
    """There is nothing that ranks would divide."""
    with pytest.raises(ConfigError, match="mamba has no attention heads"):
        check_divisible(MambaConfig(), 2)
