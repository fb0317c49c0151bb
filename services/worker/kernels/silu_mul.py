"""The gate of an MLP: SiLU of one half of a row times the other half, in one launch."""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.errors import InvariantViolated

BLOCK_COLUMNS = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Compute a block of a row, rounding after SiLU and the product, as models do; grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < width
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + columns, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=is_real, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(dtype), mask=is_real)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` [T, width] of ``gate_up`` [T, 2 * width], contiguous, gates first.

    Raises InvariantViolated for rows that are not two halves.
    """
    rows, both = gate_up.shape
    if both % 2 or not gate_up.is_contiguous():
        raise InvariantViolated(f"rows {tuple(gate_up.shape)} are not pairs of gate and up projections")
    width = both // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK_COLUMNS))
        silu_mul_kernel[grid](gate_up, out, width, BLOCK=BLOCK_COLUMNS, num_warps=4)
    return out
