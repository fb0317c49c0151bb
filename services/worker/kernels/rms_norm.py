"""RMSNorm with the residual's addition before it, in one launch."""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.kernels.block_sizes import next_power_of_two
from shared.errors import InvariantViolated

MAX_WIDTH = 65_536
"""Numbers of a row; one program holds all in registers."""


@triton.jit
def add_rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    eps,
    width,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add and norm one row, rounding after addition, normalisation and weight, as models do; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_real = columns < width
    dtype = x.dtype.element_ty
    numbers = tl.load(x + row * width + columns, mask=is_real, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * width + columns, mask=is_real, other=0.0).to(tl.float32)
        rounded = (numbers + added).to(dtype)
        tl.store(x + row * width + columns, rounded, mask=is_real)
        numbers = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    normed = (numbers * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (factor * normed).to(dtype), mask=is_real)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Add ``delta`` to ``x`` [T, width] in place, and write ``weight`` times the normed sum to ``out`` [T, width].

    ``delta`` may be None: then nothing is added. Statistics are in fp32, as in Hugging Face's modules. All contiguous
    and alike in dtype. Raises InvariantViolated for shapes, dtypes or strides that do not belong together.
    """
    rows, width = x.shape
    given = [each for each in (x, delta, out) if each is not None]
    alike = all(each.dtype == weight.dtype and each.is_contiguous() and each.shape == x.shape for each in given)
    if not alike or weight.shape != (width,):
        raise InvariantViolated(f"rows {tuple(x.shape)} cannot be normed into {tuple(out.shape)}")
    if width > MAX_WIDTH:
        raise InvariantViolated(f"a row of {width} numbers is longer than the {MAX_WIDTH} that a program holds")
    if rows:
        block = next_power_of_two(width)
        add_rms_norm_kernel[(rows,)](
            x, x if delta is None else delta, weight, out, eps, width,
            HAS_DELTA=delta is not None, BLOCK=block, num_warps=norm_warps(block),
        )  # fmt: skip


def norm_warps(block: int) -> int:
    """Return the warps for a row of ``block`` numbers: 16 numbers a thread, in 1 to 16 warps."""
    return max(1, min(16, block // 512))
