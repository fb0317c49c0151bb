"""A kernel that adds one: it fails where Triton cannot compile at all."""

# Compile-time arguments are in capitals, as everywhere in Triton; the arguments of kernels have no Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def add_one_kernel(source, target, count, BLOCK: tl.constexpr):
    """Add one to ``count`` numbers; grid (ceil(count / BLOCK),)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count) + 1, mask=index < count)


def add_one(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write ``source`` + 1 to ``target``, int32 and of one length."""
    count = len(source)
    add_one_kernel[(triton.cdiv(count, BLOCK),)](source, target, count, BLOCK=BLOCK)
