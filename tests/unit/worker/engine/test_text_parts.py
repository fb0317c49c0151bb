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
from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.text_parts import text_tensor_name
from services.worker.parallel.loading import dtype_of
from tests.unit.worker.engine.answers import generated, paged


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
