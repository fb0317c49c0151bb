"""What a model of the library answers where K and V of every token are rounded to eight bits before any token reads
them: the truth for ``--kv-dtype fp8``, with a rounding of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from tests.reference import Reference

MARGIN = 0.02
"""Rounding turns a difference in the last bit into one of a sixteenth, where a value lies between two codes."""


def rounded_by_definition(heads: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of four bits, even ones in ties, on the largest's grid: heads float32 [..., head_dim]."""
    values = heads.double()
    largest = values.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    scale = torch.where(largest > 448 * scale, 2 * scale, scale)
    exponent = torch.floor(torch.log2((values / scale).abs().clamp_min(2.0**-6)))
    step = torch.exp2(exponent - 3) * scale
    return (torch.round(values / step) * step).to(heads.dtype)


class _RoundingCache(DynamicCache):  # type: ignore[misc]  # The library has no types.
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = rounded_by_definition(key_states), rounded_by_definition(value_states)
        return super().update(key, value, *args, **kwargs)


class RoundedReference(Reference):
    """Answers over rounded K and V. Their tokens stand off from others by :data:`MARGIN`."""

    rounds = True

    @property
    def margin(self) -> float:
        return MARGIN

    def cache(self) -> DynamicCache:
        return _RoundingCache()
