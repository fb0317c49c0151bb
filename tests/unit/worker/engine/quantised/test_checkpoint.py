"""A quantised checkpoint is loaded as the weights that it means, and refused where it means something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.quantised.checkpoint import read_quantised
from services.worker.engine.quantised.codes import codes_of, detach_all
from services.worker.parallel.division import Share
from services.worker.parallel.loading import load_share
from shared.errors import UnsupportedModel
from shared.model_files import fingerprint
from shared.model_files import load_config as load_raw_config
from tests.present import present
from tests.quantised_checkpoints import CODED, SCHEMES, quantise_checkpoint


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_that_were_meant(scheme: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """To the bit, in float32, with codes where kernels have such, and the configuration says nothing of it any more."""
    quantised, plain = quantise_checkpoint(checkpoint("qwen2"), tmp_path, scheme)
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    model = load_model(quantised, load_config(quantised), dtype="float32", device="cpu", keeps_codes=True)

    parameters = dict(expected.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(found[name], parameter), name
    layers = [module for module in model.modules() if codes_of(module) is not None]
    assert len(layers) == (7 * 3 if scheme in CODED else 0)
    for layer in layers:
        assert torch.equal(present(codes_of(layer)).dequantised(torch.float32), layer.weight)
    assert model.generation_config.eos_token_id == expected.generation_config.eos_token_id
    assert not hasattr(model.config, "quantization_config")


def test_codes_are_left_where_they_are_asked_for(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """They are memory, which the portable path has no use for."""
    quantised, _ = quantise_checkpoint(checkpoint("llama"), tmp_path, "awq")

    without = load_model(quantised, load_config(quantised), dtype="float32", device="cpu")
    model = load_model(quantised, load_config(quantised), dtype="float32", device="cpu", keeps_codes=True)
    detach_all(model)

    for each in (without, model):
        assert all(codes_of(module) is None for module in each.modules())


def test_the_start_says_what_becomes_of_the_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The method, the layers and the type that they are dequantised to."""
    quantised, _ = quantise_checkpoint(checkpoint("llama"), tmp_path, "fp8_blocks")

    with capture_logs() as events:
        read_quantised(quantised, load_raw_config(quantised), torch.bfloat16, keeps_codes=False)

    said = [event for event in events if event["event"] == "weights_are_quantised"]
    assert [(each["method"], each["layers"], each["dequantised_to"]) for each in said] == [
        ("fp8", 21, "torch.bfloat16")
    ]


def test_namespaces_tell_quantised_weights_apart(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """From the weights that they mean, and schemes from one another: no KV of one is taken for another's."""
    _, plain = quantise_checkpoint(checkpoint("llama"), tmp_path / "plain", "awq")
    folders = [checkpoint("llama"), plain]
    for scheme in ("packed_int4", "packed_int4_zeros", "int8", "awq"):
        folders.append(quantise_checkpoint(checkpoint("llama"), tmp_path / scheme, scheme)[0])

    digests = [fingerprint(folder) for folder in folders]

    assert len(set(digests)) == len(folders)


def test_tensors_that_nobody_reads_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The layer is named; so is one whose scales are missing, and a checkpoint without any quantised layer."""
    quantised, plain = quantise_checkpoint(checkpoint("llama"), tmp_path, "int8")
    path = next(path for path in quantised.glob("*.safetensors") if "weight_scale" in str(load_file(path).keys()))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    layer = name.removesuffix(".weight_scale")

    save_file({**tensors, f"{layer}.input_scale": torch.ones(1)}, path)
    with pytest.raises(UnsupportedModel, match=f"{layer}: tensors input_scale of a layer"):
        _load(quantised)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, path)
    with pytest.raises(UnsupportedModel, match=f"{layer}.weight in torch.int8 is not understood"):
        _load(quantised)
    config = json.loads((quantised / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="none of its layers is"):
        _load(plain)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
def test_codes_without_scales_are_no_weights(
    name: str, ranks: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Codes of eight bits are numbers, too, up to 448: taken for weights they would answer something else entirely."""
    quantised, _ = quantise_checkpoint(checkpoint("llama"), tmp_path, "fp8_blocks")
    for path in quantised.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({key.replace("weight_scale_inv", name): each for key, each in tensors.items()}, path)
    lacking = next(path for path in quantised.glob("*.safetensors") if f"q_proj.{name}" in str(load_file(path).keys()))
    tensors = load_file(lacking)
    layer = next(key for key in tensors if key.endswith(f"q_proj.{name}")).removesuffix(f".{name}")
    save_file({key: each for key, each in tensors.items() if key != f"{layer}.{name}"}, lacking)

    with pytest.raises(UnsupportedModel, match=r"weight in .*(F8_E4M3|float8_e4m3fn) is not understood"):
        _load(quantised, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_of_activations_are_refused(ranks: int, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """AWQ divides what some models compute between two layers; without that the second one's codes mean another."""
    quantised, _ = quantise_checkpoint(checkpoint("llama"), tmp_path, "awq")
    path = next(quantised.glob("*.safetensors"))
    save_file({**load_file(path), "model.layers.0.mlp.act.scales": torch.ones(96)}, path, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.act\.scales belongs to codes that"):
        _load(quantised, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_that_the_index_does_not_name_are_not_read(
    ranks: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Such as an older save, or the same weights in another format, whose layers may lack scales."""
    quantised, _ = quantise_checkpoint(checkpoint("llama"), tmp_path, "fp8")
    shards = sorted(quantised.glob("*.safetensors"))
    index = {"weight_map": {name: path.name for path in shards for name in load_file(path)}}
    (quantised / "model.safetensors.index.json").write_text(json.dumps(index))
    alone = _load(quantised, ranks).state_dict()
    older = {name: -each for path in shards for name, each in load_file(path).items() if each.dtype == torch.float32}
    save_file(older, quantised / "model_old.safetensors")
    codes = {"layers.0.attention.wq.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn)}
    save_file(codes, quantised / "consolidated.safetensors")

    found = _load(quantised, ranks).state_dict()

    assert found.keys() == alone.keys()
    assert all(torch.equal(found[name], alone[name]) for name in found)


def test_ranks_refuse_a_checkpoint_without_quantised_layers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As a worker alone does: its configuration is of other weights."""
    quantised, plain = quantise_checkpoint(checkpoint("llama"), tmp_path, "int8")
    (plain / "config.json").write_text((quantised / "config.json").read_text())

    with pytest.raises(UnsupportedModel, match="none of its layers is"):
        _load(plain, 2)


def _load(path: Path, ranks: int = 1) -> Any:
    if ranks > 1:
        return load_share(path, load_config(path), Share(0, ranks), dtype="float32", device=torch.device("cpu"))
    return load_model(path, load_config(path), dtype="float32", device="cpu")
