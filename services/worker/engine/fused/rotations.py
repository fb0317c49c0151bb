"""Cosines and sines of every position, as the model's own rotary embedding gives them."""

from __future__ import annotations

from typing import Any

import torch

_FIRST_POSITIONS = 4096


class Rotations:
    """Tables [positions, head_dim / 2], which grow to a power of two when a step goes beyond them."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        """``rotary`` gives the same angle to a position in any batch, see ``probe.find_planes``."""
        self._rotary, self._dtype = rotary, dtype
        self.cosines = self.sines = torch.empty(0, 0, dtype=dtype)

    def cover(self, positions: torch.Tensor) -> None:
        """Extend the tables to ``positions``, int64 [T]."""
        longest = int(positions.max())
        if longest < len(self.cosines):
            return
        size = max(_FIRST_POSITIONS, 1 << longest.bit_length())
        self.cosines, self.sines = (
            each[0, :, : each.shape[-1] // 2].contiguous() for each in self.embeddings(torch.arange(size))
        )

    def embeddings(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that the model's attention modules get for ``positions``.

        They are [1, T, head_dim] each: both halves of a head are alike.
        """
        cosines, sines = self._rotary(torch.empty(0, dtype=self._dtype), positions[None])
        return cosines, sines
