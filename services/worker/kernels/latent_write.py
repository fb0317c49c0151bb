"""Write the step's new latents into their slots of the paged pool."""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.kernels.block_sizes import next_power_of_two
from shared.errors import InvariantViolated


@triton.jit
def latent_write_kernel(rows, pool, slots, stride_row, stride_slot, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the latents of one row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    values = tl.arange(0, BLOCK)
    is_real = values < WIDTH
    tl.store(pool + slot * stride_slot + values, tl.load(rows + row * stride_row + values, mask=is_real), mask=is_real)


def latent_write(rows: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write row i of ``rows`` [T, 1, width] into slot ``slots[i]`` of ``pool`` [pages, page_size, 1, width].

    Slots are int64 [T], page * page_size + offset. A row with a negative slot (padding) is not written.

    Raises InvariantViolated for shapes or strides that do not belong together.
    """
    count, heads, width = rows.shape
    pages_adjoin = pool.stride(0) == pool.shape[1] * pool.stride(1)
    if not (pages_adjoin and heads == 1 and pool.shape[2:] == (1, width) and slots.shape == (count,)):
        raise InvariantViolated(f"latents {tuple(rows.shape)} cannot be written into a pool {tuple(pool.shape)}")
    if rows.stride(2) != 1 or pool.stride(3) != 1:
        raise InvariantViolated("the numbers of one row must be adjacent in memory")
    latent_write_kernel[(count,)](
        rows, pool, slots, rows.stride(0), pool.stride(1), WIDTH=width, BLOCK=next_power_of_two(width)
    )
