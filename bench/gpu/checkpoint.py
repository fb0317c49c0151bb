"""A Llama with random weights as a checkpoint on a local disk, for what loads models as workers do.

Numbers are drawn on the device and written shard by shard, which takes as long as the disk does; loading then goes the
way of every other checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from bench.gpu.models import llama_config
from bench.make_model import TOKENIZER

SHARD_BYTES = 4 * 2**30


def write_checkpoint(
    out: Path, shape: dict[str, int], *, most_tokens: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Write config, tokenizer and weights to ``out``; returns the bytes of the weights. No token ends an answer."""
    out.mkdir(parents=True, exist_ok=True)
    config = llama_config(shape, most_tokens)
    config.dtype = dtype
    config.architectures = ["LlamaForCausalLM"]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, out / name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    shards = _shards({name: tensor.shape for name, tensor in model.state_dict().items()}, dtype.itemsize)
    random = torch.Generator(device).manual_seed(0)
    index, total = dict[str, str](), 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _drawn(name, of, random, dtype) for name, of in shard.items()}
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")
    return total


def _shards(shapes: dict[str, torch.Size], itemsize: int) -> list[dict[str, torch.Size]]:
    """Tensors in order, divided so that no file is much larger than ``SHARD_BYTES``."""
    shards: list[dict[str, torch.Size]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        nbytes = shape.numel() * itemsize
        if filled and filled + nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += nbytes
    return shards


def _drawn(name: str, shape: torch.Size, random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """On the host. Norms are ones, as a model is initialised; all else is drawn with the usual deviation."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=random.device).normal_(std=0.02, generator=random).cpu()
