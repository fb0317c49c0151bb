"""A rank's share of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Qwen3Config

from services.worker.engine.model_loading import load_config, model_bytes_of
from services.worker.parallel.division import Share
from services.worker.parallel.loading import load_share
from shared.errors import UnsupportedModel
from tests.checkpoints import _GATED, make_checkpoint, save_checkpoint

CPU = torch.device("cpu")

NORM_AND_UP = ("input_layernorm", "mlp.up_proj")


def shares(path: Path, ranks: int) -> list[Any]:
    """The models of all ranks, without the collectives between them."""
    config = load_config(path)
    return [load_share(path, config, Share(rank, ranks), dtype="auto", device=CPU) for rank in range(ranks)]


def test_ranks_divide_the_memory(tmp_path: Path) -> None:
    """Four ranks of a model hold, embeddings and norms aside, a quarter each."""
    path = make_checkpoint("llama_mha", tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(path)
    undivided = sum(
        parameter.numel() * 4
        for name, parameter in whole.named_parameters()
        if "norm" in name or "embed_tokens" in name
    )

    for model in shares(path, 4):
        assert model_bytes_of(model) == undivided + (model_bytes_of(whole) - undivided) // 4


def test_one_rank_alone_adds_the_bias_of_what_is_summed(tmp_path: Path) -> None:
    """A bias in every rank would be added as often as there are ranks."""
    path = save_checkpoint(LlamaConfig(**_GATED, attention_bias=True, mlp_bias=True), tmp_path / "model")
    name = "model.layers.0.mlp.down_proj.bias"
    bias = torch.arange(64.0)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: bias}, file, metadata={"format": "pt"})

    found = [model.get_parameter(name) for model in shares(path, 2)]

    assert torch.equal(found[0], bias)
    assert not found[1].any()


def test_attention_that_joins_heads_for_no_known_reason_is_refused(tmp_path: Path) -> None:
    """Only norms over all heads are joined here. Norms of each head need no join, so something else does."""
    path = save_checkpoint(Qwen3Config(**_GATED, head_dim=16), tmp_path / "model")
    config = load_config(path)
    config.base_model_tp_plan = {**config.base_model_tp_plan, "layers.*.self_attn.q_proj": "colwise_gather_output"}

    with pytest.raises(UnsupportedModel, match=r"q_proj \(colwise_gather_output\)"):
        load_share(path, config, Share(0, 2), dtype="auto", device=CPU)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_norm_over_all_heads_is_whole_in_every_rank(ranks: int, tmp_path: Path) -> None:
    """Its projections are divided."""
    path = save_checkpoint(Olmo2Config(**_GATED), tmp_path / "model")

    for model in shares(path, ranks):
        attention = model.model.layers[0].self_attn
        assert attention.q_norm.weight.shape == (64,)
        assert attention.k_norm.weight.shape == (32,)
        assert attention.q_proj.out_features == 64 // ranks
        assert attention.k_proj.out_features == max(16, 32 // ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_of_each_head_are_not_those_over_all(ranks: int, tmp_path: Path) -> None:
    """Where a rank has one head, they are as wide as its projection."""
    path = save_checkpoint(Qwen3Config(**_GATED, head_dim=16), tmp_path / "model")

    for model in shares(path, ranks):
        assert model.model.layers[0].self_attn.q_norm.weight.shape == (16,)


def test_a_head_that_is_not_the_embedding_is_not_tied_to_it(tmp_path: Path) -> None:
    """The library serves the head that is stored. Ranks would compute with the embedding."""
    path = make_checkpoint("llama3", tmp_path / "model")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is not None:
            save_file({**tensors, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
            shares(path, 2)
            save_file({**tensors, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match="which differ, while its configuration ties them"):
        shares(path, 2)


def test_shards_of_an_older_save_are_not_read(tmp_path: Path) -> None:
    """A save in fewer shards leaves those of the one before beside its own; the index names what the model is."""
    path = make_checkpoint("llama", tmp_path / "model", seed=1)
    new = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", tmp_path / "new", seed=2))
    new.save_pretrained(path, max_shard_size="400KB")
    make_checkpoint("llama", tmp_path / "older", seed=1)
    for shard in (tmp_path / "older").glob("*.safetensors"):
        shard.rename(path / shard.name)

    norm, up = (shares(path, 2)[0].state_dict()[f"model.layers.0.{name}.weight"] for name in NORM_AND_UP)

    assert torch.equal(norm, new.get_parameter(f"model.layers.0.{NORM_AND_UP[0]}.weight"))
    assert torch.equal(up, new.get_parameter(f"model.layers.0.{NORM_AND_UP[1]}.weight")[:48])


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """Nothing that was never loaded may answer."""
    path = make_checkpoint("llama", tmp_path / "model")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop("model.layers.1.mlp.up_proj.weight", None)
        save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_share(path, load_config(path), Share(1, 2), dtype="auto", device=CPU)
