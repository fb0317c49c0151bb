"""What each rank reads of a checkpoint, for models with experts and with fused weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.worker.parallel.division import Share
from services.worker.parallel.loading import load_share
from shared.errors import ConfigError, UnsupportedModel
from tests.checkpoints import PAD, VOCAB_SIZE, make_checkpoint, save_checkpoint
from tests.quantised_checkpoints import SCHEMES, mxfp4_checkpoint, quantise_checkpoint
from tests.unit.worker.parallel.groups import group_of
from tests.unit.worker.parallel.test_group import check_tokens, segments

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "dots1": ROUTED,
    "glm4_moe": ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": EXPERTS | {"num_dense_layers": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "flint": {"head_dim": 16},
    "granite_swa": {},
    "deepseek_v3": ROUTED | LATENTS,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "phi3": {},
    "glm4": {"head_dim": 16},
}


def checkpoint_of(model_type: str, path: Path) -> Path:
    """Random weights; of experts one by one where published checkpoints of the type have them so."""
    return save_checkpoint(AutoConfig.for_model(model_type, **(SMALL | TYPES[model_type])), path)


def divided_dim(whole: torch.Tensor, parts: list[torch.Tensor]) -> int | None:
    """The only dimension in which the parts are smaller; None where each is whole."""
    dims = [dim for dim in range(whole.dim()) if parts[0].shape[dim] != whole.shape[dim]]
    assert len(dims) <= 1
    return dims[0] if dims else None


def rejoined(name: str, whole: torch.Tensor, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole again: fused weights are interleaved by rank."""
    if "qkv_proj" in name:
        sizes = [SMALL["num_attention_heads"], *[SMALL["num_key_value_heads"]] * 2]
        split = [torch.split(part, [size * 16 // len(parts) for size in sizes], dim) for part in parts]
    elif "gate_up_proj" in name and dim < whole.dim() - 1:  # In GPT-OSS gate and up alternate.
        split = [part.chunk(2, dim) for part in parts]
    else:
        split = [(part,) for part in parts]
    return torch.cat([torch.cat(sections, dim) for sections in zip(*split, strict=True)], dim)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_shares_of_two_ranks_are_the_model(model_type: str, tmp_path: Path) -> None:
    """Nothing is left out or read twice; experts' weights are divided, and so are queries, keys and values."""
    path = checkpoint_of(model_type, tmp_path)
    config = AutoConfig.from_pretrained(path)
    whole = AutoModelForCausalLM.from_pretrained(path)

    shares = [load_share(path, config, Share(rank, 2), dtype="float32", device=torch.device("cpu")) for rank in (0, 1)]

    divided = set()
    assert {name for name, _ in shares[0].named_parameters()} == {name for name, _ in whole.named_parameters()}
    for name, expected in whole.named_parameters():
        parts = [share.get_parameter(name) for share in shares]
        dim = divided_dim(expected, parts)
        if dim is None:
            assert torch.equal(parts[0], expected)
            # What is added to a sum over ranks is added by one of them.
            assert torch.equal(parts[1], expected) or not parts[1].any()
        else:
            divided.add(name.rpartition("layers.1.")[2])
            assert torch.equal(rejoined(name, expected, parts, dim), expected)
    assert any("self_attn" in name for name in divided)
    assert any("down_proj" in name or "feed_forward.w2" in name for name in divided)
    experts = [name for name, _ in whole.named_parameters() if "layers.1." in name and ".experts." in name]
    # A bias behind a sum over ranks is one rank's.
    assert {name.rpartition("layers.1.")[2] for name in experts} - {"mlp.experts.down_proj_bias"} <= divided


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "phi3"])
def test_two_ranks_answer_as_one_does(model_type: str, tmp_path: Path) -> None:
    """Real ranks, with sums between them; tokens are those of Hugging Face for the whole model."""
    model = checkpoint_of(model_type, tmp_path / "model")

    with group_of(model, 2) as group:
        check_tokens(group, model)

    assert not segments()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shares_of_a_quantised_checkpoint_are_those_of_its_weights(scheme: str, tmp_path: Path) -> None:
    """To the bit, in every format: rows, columns, packed words, scales of groups and blocks that ranks divide."""
    folders = quantise_checkpoint(make_checkpoint("llama", tmp_path / "model"), tmp_path, scheme)

    check_shares(*folders)


@pytest.mark.parametrize(("model_type", "scheme"), [("qwen3_moe", "packed_int4_zeros"), ("deepseek_v3", "fp8_blocks")])
def test_quantised_experts_are_divided(model_type: str, scheme: str, tmp_path: Path) -> None:
    """Each expert of the checkpoint has codes of its own; the model has all experts as one tensor."""
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 64, "hidden_size": 64}
    config = AutoConfig.for_model(model_type, **(SMALL | TYPES[model_type] | sizes))
    folders = quantise_checkpoint(save_checkpoint(config, tmp_path / "model"), tmp_path, scheme)

    check_shares(*folders)


def test_experts_in_mxfp4_are_divided(tmp_path: Path) -> None:
    """As gpt-oss is published."""
    check_shares(*mxfp4_checkpoint(make_checkpoint("gpt_oss", tmp_path / "model"), tmp_path))


@pytest.mark.parametrize("scheme", ["awq", "fp8_blocks"])
def test_two_ranks_of_a_quantised_checkpoint_answer_as_one_does(scheme: str, tmp_path: Path) -> None:
    """Tokens are those of Hugging Face for the weights that the codes mean."""
    quantised, plain = quantise_checkpoint(make_checkpoint("llama", tmp_path / "model"), tmp_path, scheme)

    with group_of(quantised, 2) as group:
        check_tokens(group, plain)

    assert not segments()


def check_shares(quantised: Path, plain: Path) -> None:
    """Both ranks have the same of both checkpoints."""
    for rank in (0, 1):
        mine, expected = (
            load_share(
                path, AutoConfig.from_pretrained(path), Share(rank, 2), dtype="float32", device=torch.device("cpu")
            )
            for path in (quantised, plain)
        )
        assert [name for name, _ in mine.named_parameters()] == [name for name, _ in expected.named_parameters()]
        for name, tensor in expected.named_parameters():
            assert torch.equal(mine.get_parameter(name), tensor), name


@pytest.mark.parametrize("end", ["weight_packed", "weight_zero_point"])
def test_quantised_tensors_that_are_not_understood_are_refused(end: str, tmp_path: Path) -> None:
    """Of a layer without its codes, and of one that is no quantised layer: by name."""
    quantised, _ = quantise_checkpoint(make_checkpoint("llama", tmp_path / "model"), tmp_path, "packed_int4_zeros")
    config, layer = AutoConfig.from_pretrained(quantised), "model.layers.0.mlp.down_proj"
    for file in quantised.glob("*.safetensors"):
        tensors = load_file(file)
        ends = ("weight_packed",) if end == "weight_packed" else ("weight_packed", "weight_scale", "weight_shape")
        kept = {name: tensor for name, tensor in tensors.items() if name not in {f"{layer}.{each}" for each in ends}}
        save_file(kept, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=rf"{layer}.* not understood"):
        load_share(quantised, config, Share(0, 2), dtype="float32", device=torch.device("cpu"))


def test_experts_that_lack_a_weight_are_refused(tmp_path: Path) -> None:
    """By name of what is missing, before anything is computed."""
    path = checkpoint_of("mixtral", tmp_path)
    config = AutoConfig.from_pretrained(path)
    for file in path.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(file).items() if ".experts.3.w1." not in name}
        save_file(kept, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match="not all of their weights"):
        load_share(path, config, Share(0, 2), dtype="float32", device=torch.device("cpu"))


def test_experts_whose_width_does_not_divide_are_refused(tmp_path: Path) -> None:
    """The reason names the field of the configuration."""
    config = AutoConfig.for_model("qwen3_moe", **(SMALL | EXPERTS | {"moe_intermediate_size": 15}))

    with pytest.raises(ConfigError, match="moe_intermediate_size = 15"):
        load_share(tmp_path, config, Share(0, 2), dtype="float32", device=torch.device("cpu"))
