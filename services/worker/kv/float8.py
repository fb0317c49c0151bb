"""K and V rounded to eight bits, as pools of ``float8_e4m3fn`` keep them.

A head of a token is ``head_dim`` codes followed by a scale: the smallest power of two by which none of its values
exceeds 448, the largest code. So the value of a code has four significant bits and no exponent that a float lacks: it
is a bfloat16 and a float32, and rounding it again changes nothing. A head depends on its own values alone. If one value
is not finite, the whole head is NaN.

The compiled kernels do the same (``services/worker/native/kept.h``), and so do Triton's
(:mod:`services.worker.kernels.float8`); tests compare them to the bit.
"""

from __future__ import annotations

import torch

from shared.messages.pools import SCALE_BYTES, scale_offset

_INFINITY = 0x7F800000
_MANTISSA = 0x1FFFFF
"""Addend that carries a mantissa above 1.75, that of 448, into the exponent."""


def to_float8(values: torch.Tensor) -> torch.Tensor:
    """Round heads [..., head_dim] of any float type; return uint8 [..., head_bytes]."""
    wide = values.float()
    top = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    is_finite = top < _INFINITY
    exponent = (((top + _MANTISSA) >> 23) - 8).clamp(min=1)
    codes = (wide * ((254 - exponent) << 23).view(torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.where(is_finite, (exponent << 23).view(torch.float32), float("nan"))
    head_dim, at = values.shape[-1], scale_offset(values.shape[-1])
    kept = torch.zeros((*values.shape[:-1], at + SCALE_BYTES), dtype=torch.uint8, device=values.device)
    kept[..., :head_dim] = torch.where(is_finite, codes, 0)
    kept[..., at:] = scale.view(torch.uint8)
    return kept


def from_float8(kept: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [..., head_dim] of ``dtype`` from uint8 [..., head_bytes]; exact except in float16, whose range ends."""
    codes = kept[..., :head_dim].contiguous().view(torch.float8_e4m3fn).float()
    scale = kept[..., scale_offset(head_dim) :].contiguous().view(torch.float32)
    return (codes * scale).to(dtype)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Return heads [..., head_dim] after rounding, as values of their own type."""
    return from_float8(to_float8(values), values.shape[-1], values.dtype)
