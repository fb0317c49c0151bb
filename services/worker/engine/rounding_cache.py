"""A model of the library, by its own attention, over K and V that are rounded as pools of ``float8_e4m3fn`` keep them.

The library's cache is where a layer gets the K and V that it attends to, so a cache that rounds them is all it takes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from services.worker.kv.float8 import rounded
from shared.errors import UnsupportedModel


class RoundingCache(DynamicCache):
    """Keeps K and V, and gives them back, rounded. ``layers_rounded`` counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_rounded = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Cache``."""
        self.layers_rounded += 1
        key, value = super().update(rounded(key_states), rounded(value_states), *args, **kwargs)
        return key, value


def rounding_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of prompts ``ids`` [N, T], float32 [N, T, vocab].

    Raises UnsupportedModel for a model that does not attend to what its cache gives back.
    """
    cache = RoundingCache()
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits.float()
    if not cache.layers_rounded:
        raise UnsupportedModel(
            f"--kv-dtype fp8: {model.config.model_type} does not keep K and V in the library's cache"
        )
    return logits
