"""Keys of probe heads as storages keep them apart: codes of eight bits, by which tokens are chosen.

Which tokens matter hardly changes by the rounding, and keys are a large part of what is read. Nothing attends over
rounded keys: what is chosen is read as it was computed. ``services/storage/sparse/key_codes.py`` has the format. An
evaluation rounds keys here to the same values, so that it measures what is served.
"""

from __future__ import annotations

import torch

from shared.messages.pools import SCALE_BYTES, scale_offset
from shared.messages.sparse_reads import LARGEST_CODE


def decode_keys(encoded: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return keys, float32 [..., head_dim], from uint8 [..., code_bytes]."""
    at = scale_offset(head_dim)
    scale = encoded[..., at : at + SCALE_BYTES].contiguous().view(torch.float32)
    return encoded[..., :head_dim].contiguous().view(torch.int8).float() * scale


def rounded(keys: torch.Tensor) -> torch.Tensor:
    """Return keys [..., head_dim] of any float type after rounding, float32."""
    values = keys.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest.isfinite(), largest / LARGEST_CODE, float("nan"))
    codes = torch.where(scale > 0, values / scale, 0.0).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes * scale
