"""From a directory of a Hugging Face checkpoint to a model in memory, refusing what cannot be served exactly.

What the configuration alone can rule out is ruled out here, before any weight is read; what only running the
model can show is in :mod:`services.worker.engine.probe`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from services.worker.engine.attention import ATTENTION_NAME
from services.worker.kv.device_pool import TORCH_DTYPES
from shared.errors import ConfigError, UnsupportedModel

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE variants whose angle at a position depends on that position alone. "dynamic" and "longrope" look at the
longest position of the batch, so a token's KV would depend on who else is in it."""

# The loader patches torch's initialisers while it runs: two at once in one process leave tied weights untied.
_LOADING = threading.Lock()

LAYER_TYPES = ("full_attention", "sliding_attention")


def load_config(model_dir: Path) -> Any:
    """The checkpoint's configuration. Raises UnsupportedModel, with every reason that it alone can show."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"{model_dir} holds no readable model configuration: {error}") from error
    reasons = list(_reasons_against(config))
    if reasons:
        raise UnsupportedModel(f"{config.model_type} cannot be served exactly: {'; '.join(reasons)}")
    return config


def load_model(model_dir: Path, config: Any, *, dtype: str, device: str) -> Any:
    """The model with its weights on ``device``, in ``dtype`` ("auto" is the checkpoint's own), ready for inference.

    Raises UnsupportedModel when weights are missing or of the wrong shape: what Hugging Face fills with random
    numbers must not answer anybody.
    """
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(TORCH_DTYPES)}, not {dtype!r}")
    transformers_logging.disable_progress_bar()
    try:
        with _LOADING:
            model, report = AutoModelForCausalLM.from_pretrained(
                model_dir,
                config=config,
                dtype=TORCH_DTYPES.get(dtype, "auto"),
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UnsupportedModel(f"{model_dir} cannot be loaded: {error}") from error
    missing = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise UnsupportedModel(f"{model_dir} lacks weights: {', '.join(missing[:4])} ({len(missing)} in all)")
    check_forward(model)
    model.eval().requires_grad_(False)
    return model.to(torch.device(device))


def check_forward(model: Any) -> None:
    """Raise UnsupportedModel unless ``model`` can be asked for the logits of chosen rows."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{type(model).__name__} cannot compute logits for chosen rows only")


def expected_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer as the configuration has it; None is full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the generation config, else those of the model's; sorted."""
    for config in (model.generation_config, model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(sorted(found)) if isinstance(found, list | tuple) else (int(found),)
    return ()


def max_context_tokens(config: Any) -> int:
    """Positions that the model knows."""
    return int(config.max_position_embeddings)


def _reasons_against(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model"
    if config.get_text_config() is not config or getattr(config, "vision_config", None) is not None:
        yield "it takes more than text"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "its attention is not causal"
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        yield "its configuration names no longest context"
    if getattr(config, "attention_chunk_size", None) is not None:
        yield "it attends in chunks"
    if getattr(config, "alibi", False):
        yield "it uses ALiBi"
    odd_layers = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if odd_layers:
        yield f"it has layers of type {', '.join(odd_layers)}"
    for field in ("rope_parameters", "rope_scaling"):
        for rope_type in _rope_types(getattr(config, field, None)):
            if rope_type not in STATIC_ROPE_TYPES:
                yield f"its RoPE type {rope_type!r} makes KV depend on the rest of the batch"


def _rope_types(parameters: object) -> Iterator[str]:
    """Types in one RoPE dictionary, or in one for each type of layer."""
    if not isinstance(parameters, dict):
        return
    for key, value in parameters.items():
        if key in ("rope_type", "type") and value is not None:
            yield str(value)
        yield from _rope_types(value)
