"""Of a model with images or sound the text part is served, and answers text as the whole model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from bench.model_support.tiny_configs import tiny_configs
from bench.model_support.trial import save_random
from services.gateway import model_facts
from services.worker.engine.model_loading import eos_token_ids, load_config, load_model
from services.worker.engine.text_parts import text_tensor_name
from services.worker.parallel.loading import dtype_of
from tests.unit.worker.engine.answers import generated, paged

FLAT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps"),
)


def checkpoint_of(model_type: str, path: Path) -> Path:
    """A tiny whole model, with the tensors of its other parts."""
    return save_random(next(iter(tiny_configs(model_type))), path, seed=0)


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "llama4", "minimax_m3_vl", "mistral3", "qianfan_ocr"])
def test_answers_are_those_of_the_whole_model(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token the whole model's own generate, whichever class of the library the text part has."""
    # The whole Llama 4 of Transformers 5.24 reads a field that its text part's output lacks.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    path = checkpoint_of(model_type, tmp_path)

    assert paged(path) == generated(path, auto_class=AutoModelForImageTextToText)


ALIKE = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", "glm4v_moe"]


@pytest.mark.parametrize("model_type", ALIKE)
def test_text_parts_that_are_another_type_answer_as_the_whole_model(model_type: str, tmp_path: Path) -> None:
    """The library has no class of their own that answers, and three positions of a text's token are one."""
    path = checkpoint_of(model_type, tmp_path)

    assert paged(path) == generated(path, auto_class=AutoModelForImageTextToText)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_class_that_is_listed_among_those_for_images_is_found(tmp_path: Path, *, is_part: bool) -> None:
    """Mistral 4 alone, and as the text part of Mistral 3's type."""
    config = next(iter(tiny_configs("mistral4")))
    if is_part:
        text, config = config, next(iter(tiny_configs("mistral3")))
        config.text_config = text
    path = save_random(config, tmp_path, seed=0)

    assert paged(path) == generated(path, auto_class=AutoModelForImageTextToText)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_text_parts_without_a_configuration_of_their_own_are_found(model_type: str, tmp_path: Path) -> None:
    """As published, Qwen's earlier models have the sizes of their text beside those of the whole model."""
    path = checkpoint_of(model_type, tmp_path)
    expected = generated(path, auto_class=AutoModelForImageTextToText)
    raw = json.loads((path / "config.json").read_text())
    text = {name: value for name, value in raw.pop("text_config").items() if name in FLAT}
    published = {"rope_theta": 10_000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (path / "config.json").write_text(json.dumps(text | raw | published))
    (file,) = path.glob("*.safetensors")
    tensors = {name.replace("model.language_model.", "model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})

    assert paged(path) == expected


def test_experts_may_be_stored_by_columns(tmp_path: Path) -> None:
    """As published, those of Qwen3-VL; the library saves them by rows."""
    config = next(iter(tiny_configs("qwen3_vl_moe")))
    config.text_config.moe_intermediate_size = 48  # Not square, which would not tell rows from columns.
    path = save_random(config, tmp_path, seed=0)
    expected = generated(path, auto_class=AutoModelForImageTextToText)
    (file,) = path.glob("*.safetensors")
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})

    assert paged(path) == expected


def test_tokens_that_end_an_answer_may_stand_beside_the_text_part(tmp_path: Path) -> None:
    """As in Gemma 3; the gateway reads the same."""
    path = checkpoint_of("gemma3", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"].pop("eos_token_id", None)
    (path / "config.json").write_text(json.dumps(raw | {"eos_token_id": [1, 106]}))
    (path / "generation_config.json").write_text("{}")

    found = eos_token_ids(load_model(path, load_config(path), dtype="float32", device="cpu"))

    assert found == model_facts.eos_token_ids(path) == (1, 106)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_tensors_are_found_under_older_and_newer_names(prefix: str, tmp_path: Path) -> None:
    """Checkpoints keep the text part in one place or the other; the head lies beside it or in it."""
    path = checkpoint_of("llava", tmp_path)
    expected = load_model(path, load_config(path), dtype="float32", device="cpu").state_dict()
    (file,) = path.glob("*.safetensors")
    head = "language_model.lm_head." if prefix.startswith("language_model") else "lm_head."
    tensors = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head): tensor
        for name, tensor in ((text_tensor_name(name), tensor) for name, tensor in load_file(file).items())
        if "vision" not in name and "projector" not in name
    }
    save_file(tensors, file, metadata={"format": "pt"})

    found = load_model(path, load_config(path), dtype="float32", device="cpu").state_dict()

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "mistral3"])
def test_the_type_of_the_weights_may_stand_beside_the_text_part(model_type: str, tmp_path: Path) -> None:
    """A worker alone and a group of ranks, which cannot ask the library, take it."""
    path = checkpoint_of(model_type, tmp_path)
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"].pop("dtype", None)
    (path / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))

    assert dtype_of(load_config(path), "auto") == torch.bfloat16


def test_a_model_that_sees_images_both_ways_is_served_over_text(tmp_path: Path) -> None:
    """Gemma 4's unified type, here with heads of one size: what its masks show of text is causal."""
    made = next(iter(tiny_configs("gemma4_unified_text"))).to_dict() | {"per_layer_config": {"1": {"head_dim": 16}}}
    config = CONFIG_MAPPING["gemma4_unified_text"](**{key: made[key] for key in made if key != "model_type"})
    path = save_random(config, tmp_path, seed=0)

    assert config.use_bidirectional_attention == "vision"
    assert paged(path) == generated(path)
