"""Reductions over the last dimension, one program a row: means, layer norms and log-softmax.

torch's own reductions divide a row among more threads where there are few rows, and log-softmax where a row is not
aligned; both change the order of the sum.
"""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.kernels.block_sizes import next_power_of_two
from services.worker.kernels.exact.matmul import DTYPES
from shared.errors import UnsupportedModel

_MOST_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def mean_kernel(x, out, width, BLOCK: tl.constexpr):
    """Average one row of x; grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(total, 0) / width).to(out.dtype.element_ty))


@triton.jit
def layer_norm_kernel(
    x, weight, bias, out, means, deviations, width, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one row of x; grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / width
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        off = tl.where(at < width, value - mean, 0.0)
        squares += off * off
    reciprocal = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    tl.store(means + row, mean)
    tl.store(deviations + row, reciprocal)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        exists = at < width
        value = (tl.load(x + row * width + at, mask=exists, other=0.0).to(tl.float32) - mean) * reciprocal
        if HAS_WEIGHT:
            value = value * tl.load(weight + at, mask=exists, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value = value + tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)
        tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=exists)


@triton.jit
def log_softmax_kernel(x, out, width, BLOCK: tl.constexpr):
    """Take the log-softmax of one row of x; grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, value)
    peak = tl.max(largest, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(x + row * width + at, mask=at < width, other=float("-inf")).to(tl.float32) - peak)
    log_sum = tl.log(tl.sum(total, 0))
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(out + row * width + at, (value - peak - log_sum).to(out.dtype.element_ty), mask=at < width)


def mean(x: torch.Tensor) -> torch.Tensor:
    """Return the means of rows of x [..., N], fp32, bf16 or fp16, in fp32 sums. Raises UnsupportedModel for others."""
    rows = _rows(x)
    out = torch.empty(len(rows), dtype=x.dtype, device=x.device)
    if len(rows):
        mean_kernel[(len(rows),)](rows, out, rows.shape[1], **_sizes(rows))
    return out.view(x.shape[:-1])


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [M, N] normalised, its means and reciprocal deviations, fp32 [M]. Raises as :func:`mean`."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    means, deviations = (torch.empty(len(rows), dtype=torch.float32, device=x.device) for _ in range(2))
    if len(rows):
        layer_norm_kernel[(len(rows),)](
            rows, rows if weight is None else weight, rows if bias is None else bias, out, means, deviations,
            rows.shape[1], eps, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            **_sizes(rows),
        )  # fmt: skip
    return out, means, deviations


def log_softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the logarithm of the softmax of the rows of x [..., N], in ``dtype``. Raises as :func:`mean`."""
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    if len(rows):
        log_softmax_kernel[(len(rows),)](rows, out, rows.shape[1], **_sizes(rows))
    return out.view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in DTYPES:
        raise UnsupportedModel(f"--exact has no reduction of {x.dtype}")
    return x.contiguous().view(-1, x.shape[-1])


def _sizes(rows: torch.Tensor) -> dict[str, int]:
    return {"BLOCK": min(_MOST_BLOCK, next_power_of_two(rows.shape[1])), "num_warps": _NUM_WARPS}
