"""A library model, by its own attention, over K and V that are rounded as in pools of ``float8_e4m3fn``.

The library's cache is where a layer gets the K and V that it attends to, so a cache that rounds them is all it takes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from services.worker.engine.cache_argument import given_cache
from services.worker.kv.float8 import rounded
from shared.errors import UnsupportedModel


class RoundingCache(DynamicCache):
    """A cache of the library that keeps K and V, and returns them, rounded. ``layers_rounded`` counts calls."""

    def __init__(self) -> None:
        """Begin empty, with no call counted."""
        super().__init__()
        self.layers_rounded = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round the new K and V and add them; return all of the layer's, see ``Cache``."""
        self.layers_rounded += 1
        key, value = super().update(rounded(key_states), rounded(value_states), *args, **kwargs)
        return key, value


def rounding_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of prompts ``ids`` [N, T] over rounded K and V, float32 [N, T, vocab].

    Raises UnsupportedModel for a model that does not attend to what its cache returns.
    """
    cache = RoundingCache()
    logits: torch.Tensor = model(input_ids=ids, use_cache=True, **given_cache(model.forward, cache)).logits.float()
    if not cache.layers_rounded:
        raise UnsupportedModel(
            f"--kv-dtype fp8: {model.config.model_type} does not keep K and V in the library's cache"
        )
    return logits
