"""A rank's share of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config

from services.worker.engine.model_loading import load_config, model_bytes_of
from services.worker.parallel.division import Share
from services.worker.parallel.loading import load_share
from shared.errors import ConfigError, UnsupportedModel
from tests.checkpoints import _GATED, make_checkpoint, save_checkpoint

CPU = torch.device("cpu")


def shares(path: Path, ranks: int) -> list[Any]:
    """The models of all ranks, without the collectives between them."""
    config = load_config(path)
    return [load_share(path, config, Share(rank, ranks), dtype="auto", device=CPU) for rank in range(ranks)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama3"])
def test_shares_put_together_are_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Columns, rows and biases; what is not divided is whole in every rank."""
    path = make_checkpoint(family, tmp_path / family)
    whole = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())

    parts = [dict(model.named_parameters()) for model in shares(path, 2)]

    assert set(parts[0]) == set(whole)
    for name, expected in whole.items():
        pieces = [part[name].detach() for part in parts]
        if pieces[0].shape == expected.shape:
            assert all(torch.equal(piece, expected) for piece in pieces), name
        else:
            dim = next(at for at, (a, b) in enumerate(zip(pieces[0].shape, expected.shape, strict=True)) if a != b)
            assert torch.equal(torch.cat(pieces, dim), expected), name


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


def test_ranks_that_are_more_than_kv_heads_share_them(tmp_path: Path) -> None:
    """Of two KV heads, the first two of four ranks have the first."""
    path = make_checkpoint("llama", tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(path).model.layers[1].self_attn.k_proj.weight

    found = [model.model.layers[1].self_attn.k_proj.weight for model in shares(path, 4)]

    assert [torch.equal(part, whole[:16]) for part in found] == [True, True, False, False]
    assert [torch.equal(part, whole[16:]) for part in found] == [False, False, True, True]


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


def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    """With what does not: here four query heads and two KV heads among three."""
    path = make_checkpoint("llama", tmp_path / "model")

    with pytest.raises(ConfigError, match="--tensor-parallel 3: llama has 4 attention heads, 2 KV heads"):
        load_share(path, load_config(path), Share(0, 3), dtype="auto", device=CPU)


def test_models_that_join_heads_within_a_layer_are_refused(tmp_path: Path) -> None:
    """A norm over all heads needs an exchange that is not made here; the modules are named."""
    path = save_checkpoint(Olmo2Config(**_GATED), tmp_path / "model")

    with pytest.raises(UnsupportedModel, match=r"q_proj \(colwise_gather_output\)"):
        load_share(path, load_config(path), Share(0, 2), dtype="auto", device=CPU)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """Nothing that was never loaded may answer."""
    path = make_checkpoint("llama", tmp_path / "model")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop("model.layers.1.mlp.up_proj.weight", None)
        save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_share(path, load_config(path), Share(1, 2), dtype="auto", device=CPU)
