"""Shape and type of one token's hidden states: the input of each layer's attention module."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.kv.device_pool import TORCH_DTYPES
from shared.messages.pools import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """Hidden states can be exchanged only between models whose shapes are equal. ``dtype`` is the model's."""

    layers: int
    hidden: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's own type."""
        return TORCH_DTYPES[self.dtype]
