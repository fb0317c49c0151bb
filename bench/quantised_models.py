"""Quantised copies of a checkpoint by rounding to nearest, for measurements of speed: answers do not matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantise(source: Path, out: Path, *, bits: int, group: int | None) -> Path:
    """Write ``source`` to ``out`` with its linear layers as compressed-tensors has them, packed, symmetric, with scales
    in float16 for each ``group`` of inputs, or for each output where it is None.
    """
    shutil.copytree(source, out)
    for path in sorted(out.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            layer, _, end = name.rpartition(".")
            if end == "weight" and layer.endswith(LAYERS):
                tensors |= {f"{layer}.{part}": value for part, value in _packed(tensor, bits, group).items()}
            else:
                tensors[name] = tensor
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _settings(bits, group)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def _packed(weight: torch.Tensor, bits: int, group: int | None) -> dict[str, torch.Tensor]:
    outputs, inputs = weight.shape
    grouped = weight.float().view(outputs, -1, group or inputs)
    most = (1 << bits - 1) - 1
    scales = (grouped.abs().amax(-1) / most).half()
    codes = (grouped / scales.float()[:, :, None]).round().clamp(-most, most).int().view(outputs, inputs)
    words = ((codes + most + 1).view(outputs, -1, 32 // bits) << torch.arange(0, 32, bits)).sum(-1)
    return {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _settings(bits: int, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
