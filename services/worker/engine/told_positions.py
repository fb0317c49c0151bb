"""Positions for modules that count them themselves.

A batch is flattened: its rows are of several requests, each with a past of its own. Two kinds of modules do not go by
the positions that a model is called with:

- embeddings of RoBERTa and its kin count from behind the padding token's number where they are called without
  positions, which is how these models were trained, and take positions as they are where they are called with some. So
  the positions that they are called with begin there, too.
- layers of Llama 4 that scale queries by their position (arXiv 2501.19399) count rows from the length of their cache.
  They are given, in its place, the distance of each row from its number in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from services.worker.engine.cache_argument import cache_argument
from shared.model_context import first_of


def tell_positions(model: Any) -> None:
    """Have all modules of ``model`` use the positions that it is called with, which begin at 0."""
    first = first_of(model.config)
    for module in model.modules():
        if first and hasattr(module, "create_position_ids_from_input_ids"):
            module.forward = partial(_shifted, module.forward, first)
        attention: Any = getattr(module, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            module.forward = partial(_counting, module.forward, cache_argument(module.forward))


def unpadded(tokens: torch.Tensor, config: Any) -> torch.Tensor:
    """Return ``tokens`` with padding tokens replaced, which a model called without positions would not count."""
    if not first_of(config):
        return tokens
    return torch.where(tokens == config.pad_token_id, tokens + 1, tokens)


def _shifted(
    forward: Callable[..., Any], first: int, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    return forward(*args, position_ids=None if position_ids is None else position_ids + first, **kwargs)


def _counting(forward: Callable[..., Any], cache: str, /, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
    rows = torch.arange(position_ids.shape[1], device=position_ids.device)
    kwargs[cache] = _Distances(position_ids[0] - rows)
    return forward(*args, position_ids=position_ids, **kwargs)


class _Distances:
    """The cache argument of such layers: its length differs by row, and it keeps nothing."""

    def __init__(self, distances: torch.Tensor) -> None:
        self._distances = distances

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return int64 [T]: by how much the position of each row exceeds its number in the batch."""
        return self._distances

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new rows alone, as attention without a cache has them."""
        return key_states, value_states
