"""Matrix products whose rows are the same to the bit for any number of rows.

Every element is one sum over K in blocks of a fixed size, from the first to the last, in one program; K is never
divided among programs. The tile depends on the dtype and, where it is known which operand is the weight, on the number
of its rows; never on how many rows are multiplied with it. cuBLAS chooses tile and division of K by the whole shape.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.errors import InvariantViolated, UnsupportedModel

_WIDE_COLUMNS = 16_384
"""Weights of so many rows or more have wide tiles: 128 programs occupy a GPU, even for a single row of the batch."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of the result, in rows and columns, and how much of K it takes at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, weight_rows: int = 0) -> Tile:
    """Return the tile of products of this dtype with a weight of ``weight_rows`` rows.

    ``weight_rows`` is 0 where either operand may be the weight.
    """
    if dtype == torch.float32:
        return Tile(rows=64, columns=64, depth=16, num_warps=4, num_stages=3)
    return Tile(rows=64, columns=128 if weight_rows >= _WIDE_COLUMNS else 64, depth=64, num_warps=4, num_stages=4)


# Nothing is specialised on values that differ from step to step: another variant could have other instructions.
# Strides are: whether they are multiples of 16 decides how wide the loads are, and with one batch they are the model's.
@triton.jit(do_not_specialize=["rows", "columns"])
def matmul_kernel(
    a,
    b,
    bias,
    out,
    rows,
    columns,
    depth,
    stride_a_batch,
    stride_a_row,
    stride_a_depth,
    stride_b_batch,
    stride_b_depth,
    stride_b_column,
    stride_out_batch,
    stride_out_row,
    stride_bias_row,
    stride_bias_column,
    beta,
    alpha,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """Compute one tile; grid (tiles, batch).

    Tiles go down BAND tiles of rows before they go to the next columns, so that programs that run side by side read the
    same weights.
    """
    number, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    band = number // (BAND * column_tiles)
    band_rows = tl.minimum(BAND, row_tiles - band * BAND)
    within = number % (BAND * column_tiles)
    row = ((band * BAND + within % band_rows) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = ((within // band_rows) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_at = a + batch * stride_a_batch + row[:, None] * stride_a_row + inner[None, :] * stride_a_depth
    b_at = b + batch * stride_b_batch + inner[:, None] * stride_b_depth + column[None, :] * stride_b_column
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for done in range(0, depth, BLOCK_K):
        exists = inner < depth - done
        left = tl.load(a_at, mask=(row < rows)[:, None] & exists[None, :], other=0.0)
        right = tl.load(b_at, mask=exists[:, None] & (column < columns)[None, :], other=0.0)
        # "ieee" keeps fp32 exact; on 16-bit types it changes nothing.
        total = tl.dot(left, right, total, input_precision="ieee")
        a_at += BLOCK_K * stride_a_depth
        b_at += BLOCK_K * stride_b_depth
    is_real = (row < rows)[:, None] & (column < columns)[None, :]
    if IS_SCALED:
        total = total * alpha
    if HAS_BIAS:
        bias_at = bias + row[:, None] * stride_bias_row + column[None, :] * stride_bias_column
        added = tl.load(bias_at, mask=is_real, other=0.0).to(tl.float32)
        if IS_SCALED:
            added = added * beta
        total = total + added
    into = out + batch * stride_out_batch + row[:, None] * stride_out_row + column[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=is_real)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``: x [M, K], weight [N, K], bias [N]; the result [M, N] is contiguous, of x's dtype.

    fp32, bf16 or fp16, alike in all operands; sums are fp32. Raises UnsupportedModel for other dtypes.
    """
    return _product(x[None], weight.T[None], bias, tile_for(x.dtype, weight.shape[0]))[0]


def product(
    a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> torch.Tensor:
    """Return ``alpha * (a @ b) + beta * added``, where rows of the batch may be a's rows or b's columns.

    a [B, M, K], b [B, K, N], any strides; ``added`` broadcasts to [M, N] and is for B = 1. Raises as :func:`matmul`.
    """
    return _product(a, b, added, tile_for(a.dtype), beta=beta, alpha=alpha)


def _product(
    a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None, tile: Tile, *, beta: float = 1.0, alpha: float = 1.0
) -> torch.Tensor:
    batch, rows, depth = a.shape
    columns = b.shape[2]
    if a.dtype not in DTYPES or a.dtype != b.dtype or (added is not None and added.dtype != a.dtype):
        raise UnsupportedModel(f"--exact has no product of {a.dtype} and {b.dtype}")
    if b.shape[:2] != (batch, depth):
        raise InvariantViolated(f"matrices of {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    out = torch.empty((batch, rows, columns), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    if added is not None:
        added = added.expand(rows, columns)
    is_scaled = alpha != 1.0 or beta != 1.0
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), batch)
    matmul_kernel[grid](
        a, b, out if added is None else added, out, rows, columns, depth,
        _stride(a, 0, 0), _stride(a, 1, depth), _stride(a, 2, 1),
        _stride(b, 0, 0), _stride(b, 1, columns), _stride(b, 2, 1), _stride(out, 0, 0), columns,
        0 if added is None else added.stride(0), 0 if added is None else added.stride(1),
        float(beta), float(alpha), HAS_BIAS=added is not None, IS_SCALED=is_scaled,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, BAND=8,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _stride(matrix: torch.Tensor, dim: int, of_several: int) -> int:
    """Return the stride of a dimension; one of size 1 gets the stride of a larger one in a plain matrix."""
    return matrix.stride(dim) if matrix.shape[dim] > 1 else of_several
