"""LoRA adapters for the checkpoints of tests, as PEFT saves them, and models with one merged into their weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    checkpoint: Path,
    path: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ATTENTION,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    **settings: Any,
) -> Path:
    """Write a random adapter of all layers of ``checkpoint`` that end in one of ``targets``; returns ``path``.

    ``ranks`` is PEFT's ``rank_pattern``. Terms are of the size of what they are added to, so that tokens change.
    """
    path.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.rpartition(".")[2] not in targets:
            continue
        own = next((value for key, value in (ranks or {}).items() if re.match(rf"(.*\.)?({key})$", name)), rank)
        a = torch.randn(own, module.in_features, generator=generator) * size / math.sqrt(own)
        b = torch.randn(module.out_features, own, generator=generator) * size
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype).contiguous()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "loftq_config": {},
    }
    (path / "adapter_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    return path


def merged_model(checkpoint: Path, adapter: Path) -> PreTrainedModel:
    """The model in float32 with ``scale * B @ A`` added to its weights: an oracle that shares nothing with workers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in {key.partition(".lora_")[0] for key in tensors}:
        a, b = (tensors[f"{name}.lora_{part}.weight"].double() for part in "AB")
        own = [value for key, value in config["alpha_pattern"].items() if re.match(rf"(.*\.)?({key})$", name)]
        alpha = own[0] if own else config["lora_alpha"]
        scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
        weight = model.get_submodule(name.removeprefix("base_model.model.")).weight
        with torch.no_grad():
            weight.copy_(weight.double() + scale * b @ a)
    return model
