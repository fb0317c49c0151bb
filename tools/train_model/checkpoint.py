"""A run on disk: model, optimiser, random states and counters; a resumed run goes on exactly.

Also the other way to start: from the weights of an exported model (``--init``), pooled when the
variant has fewer key/value heads.
"""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.train_model.model import LanguageModel, ModelConfig
from tools.train_model.optimiser import MuonAdamW


@dataclass(slots=True)
class Run:
    """Everything that changes while training."""

    model: LanguageModel
    optimiser: MuonAdamW
    rng: random.Random
    """Draws the rows and their lengths."""
    generator: torch.Generator
    """Draws which context tokens enter the loss."""
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def save_run(run: Run, path: Path) -> None:
    """Write the run to ``path`` in one rename, so that a kill leaves the old file whole."""
    state: dict[str, Any] = {
        "config": run.model.config.as_dict(),
        "model": run.model.state_dict(),
        "optimiser": run.optimiser.state_dict(),
        "rng": run.rng.getstate(),
        "generator": run.generator.get_state(),
        "step": run.step,
        "tokens": run.tokens,
        "elapsed_s": run.elapsed_s,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_run(run: Run, path: Path) -> None:
    """Overwrite ``run`` with the state at ``path``; the model's sizes must agree."""
    # The file is our own and holds a tuple of Python's random state, which weights_only refuses.
    state = torch.load(path, map_location="cpu", weights_only=False)
    if state["config"] != run.model.config.as_dict():
        raise ValueError(f"{path} holds a model of other sizes: {state['config']}")
    run.model.load_state_dict(state["model"])
    run.optimiser.load_state_dict(state["optimiser"])
    run.rng.setstate(state["rng"])
    run.generator.set_state(state["generator"])
    run.step, run.tokens, run.elapsed_s = state["step"], state["tokens"], state["elapsed_s"]


def read_config(folder: Path) -> ModelConfig:
    """The sizes of an exported model."""
    config = json.loads((folder / "config.json").read_text())
    return ModelConfig(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        feed_forward=config["intermediate_size"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        context_tokens=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
    )


def pool_heads(weight: Tensor, kv_heads: int, head_size: int) -> Tensor:
    """Average the heads of a key or value projection into ``kv_heads`` groups.

    Ainslie et al. 2023, "GQA", section 2.1: mean pooling is the best of the simple conversions.
    """
    grouped = weight.view(kv_heads, -1, head_size, weight.shape[1])
    return grouped.mean(1).reshape(kv_heads * head_size, weight.shape[1])


def load_exported(folder: Path, kv_heads: int) -> LanguageModel:
    """Build a model from an exported one, pooling its heads to ``kv_heads`` if it has more."""
    source = read_config(folder)
    config = ModelConfig(**{**source.as_dict(), "kv_heads": kv_heads})
    weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    if kv_heads != source.kv_heads:
        for name in [n for n in weights if "k_proj" in n or "v_proj" in n]:
            weights[name] = pool_heads(weights[name], kv_heads, source.head_size)
    model = LanguageModel(config)
    model.load_state_dict(weights)
    return model
