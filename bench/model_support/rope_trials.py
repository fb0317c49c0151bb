"""Rotary embeddings of every kind on one model type, against the library's own ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from bench.model_support.tiny_configs import CONTEXT
from bench.model_support.trial import Outcome, try_configs

_THETA = {"rope_theta": 10_000.0}
_HALF_HEAD = 8
_ORIGINAL = 32  # Shorter than the prompts, so that the library chooses the long factors from the first token on.

_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "longrope, long factors": {
        "rope_type": "longrope",
        "short_factor": [1.0] * _HALF_HEAD,
        "long_factor": [1.0 + each / 2 for each in range(_HALF_HEAD)],
        "original_max_position_embeddings": _ORIGINAL,
    },
    "longrope, short factors": {
        "rope_type": "longrope",
        "short_factor": [1.0 + each / 4 for each in range(_HALF_HEAD)],
        "long_factor": [8.0] * _HALF_HEAD,
        "original_max_position_embeddings": CONTEXT,
    },
}


def rope_config(name: str) -> Any:
    """A tiny Llama with rotary embeddings of the kind ``name``."""
    return LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={**_THETA, **_PARAMETERS[name]},
    )


def _try(name: str, folder: Path) -> Outcome:
    return try_configs(iter([rope_config(name)]), folder, seed=0)


ROPE_TRIALS: dict[str, Callable[[Path], Outcome]] = {name: partial(_try, name) for name in _PARAMETERS}
