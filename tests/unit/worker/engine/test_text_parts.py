"""Of a model with images or sound the text part is served, and answers text as the whole model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from bench.model_support.tiny_configs import tiny_configs
from bench.model_support.trial import save_random
from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.text_parts import PROVEN, text_tensor_name
from shared.errors import UnsupportedModel
from tests.unit.worker.engine.answers import generated, paged


def checkpoint_of(model_type: str, path: Path) -> Path:
    """A tiny whole model, with the tensors of its other parts."""
    return save_random(next(iter(tiny_configs(model_type))), path, seed=0)


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "llama4", "minimax_m3_vl", "mistral3", "qianfan_ocr"])
def test_answers_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    """Token for token the whole model's own generate, whichever class of the library the text part has."""
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


def test_a_model_that_sees_images_both_ways_is_served_over_text(tmp_path: Path) -> None:
    """Gemma 4's unified type, here with heads of one size: what its masks show of text is causal."""
    made = next(iter(tiny_configs("gemma4_unified_text"))).to_dict() | {"per_layer_config": {"1": {"head_dim": 16}}}
    config = CONFIG_MAPPING["gemma4_unified_text"](**{key: made[key] for key in made if key != "model_type"})
    path = save_random(config, tmp_path, seed=0)

    assert config.use_bidirectional_attention == "vision"
    assert paged(path) == generated(path)


def test_a_type_that_was_not_compared_is_refused(tmp_path: Path) -> None:
    """PaliGemma's text is seen in both directions by the whole model, so its text part is none of those proven."""
    next(iter(tiny_configs("paligemma"))).save_pretrained(tmp_path)

    assert "paligemma" not in PROVEN
    with pytest.raises(UnsupportedModel, match=r"paligemma takes more than text.*was not proven"):
        load_config(tmp_path)


def test_a_text_part_without_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    """The reason names the part."""
    (tmp_path / "config.json").write_text(json.dumps(AutoConfig.for_model("qwen2_vl").to_dict()))

    with pytest.raises(UnsupportedModel, match="no class that serves its text part, qwen2_vl_text"):
        load_config(tmp_path)
