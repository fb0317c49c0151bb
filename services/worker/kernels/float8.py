"""K and V of eight bits in the kernels: reading and writing the form of ``services.worker.kv.float8``.

Codes are decoded by integer operations and by half precision, which every GPU has: conversions of such numbers exist on
sm_89 and later only. Kernels recognise a pool of them by its type, uint8.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.messages.pools import SCALE_BYTES, scale_offset


def kept_width(pool: torch.Tensor, head_dim: int) -> int:
    """Return how many elements of this pool a head of ``head_dim`` values takes."""
    return scale_offset(head_dim) + SCALE_BYTES if pool.dtype == torch.uint8 else head_dim


@triton.jit
def load_heads(head, slots, offsets, exists, readable, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """Return heads [N, BLOCK_D] of ``dtype``, zeros where nothing is ``readable``.

    ``head`` points at this head of slot 0, ``slots`` [N] are the slots' offsets from there, and ``offsets`` [N,
    BLOCK_D] those of values.
    """
    if head.dtype.element_ty == tl.uint8:
        # Heads and slots are multiples of a scale's size, which Triton does not know of their strides.
        head, slots = tl.multiple_of(head, 4), tl.multiple_of(slots, 4)
        dims = tl.arange(0, offsets.shape[1])
        codes = tl.load(head + (slots[:, None] + dims[None, :]), mask=readable, other=0).to(tl.int16)
        half = ((codes & 128) << 8) | ((codes & 127) << 7)
        scale_at = (head + slots + (HEAD_DIM + 3) // 4 * 4).to(tl.pointer_type(tl.float32))
        scale = tl.load(scale_at, mask=exists, other=0.0)
        # A code is a number of half precision with fewer bits, 256 times as small.
        values = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale[:, None]).to(dtype)
    else:
        values = tl.load(head + offsets, mask=readable, other=0.0)
    return values


@triton.jit
def scale_of(values):
    """Return exponents [M, 1] of the scales of heads [M, N], float32, and whether all values of a head are finite."""
    size = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(size, 1)[:, None]
    return tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1), top < 0x7F800000


@triton.jit
def codes_of(values, exponent, is_finite):
    """Return codes of ``values`` float32 [M, N], rounded to nearest even, with the results of :func:`scale_of`."""
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The last bit of 2**14 has the value of that of the smallest codes.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < (121 << 23), small, large) | ((bits >> 24) & 128)
    return tl.where(is_finite, code, 0).to(tl.uint8)


@triton.jit
def store_scale(head, exponent, is_finite, mask, HEAD_DIM: tl.constexpr):
    """Write the scales of heads behind their codes; ``head`` [M, 1] points at the first code of each."""
    at = (head + (HEAD_DIM + 3) // 4 * 4).to(tl.pointer_type(tl.float32))
    scale = tl.where(is_finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(at, scale, mask=mask)
