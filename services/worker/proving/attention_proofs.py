"""Proofs of attention over the paged pool, one for each backend, of writing K and V, and of Triton itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from services.worker.engine.torch_attention import page_tables, torch_attention
from services.worker.kv.float8 import to_float8
from services.worker.proving.cases import (
    Step,
    compare,
    compare_bytes,
    decode_step,
    expected,
    is_timed,
    kind_name,
    kinds,
    make_step,
    seconds_of,
    steps,
)
from services.worker.proving.table import ServedShape, Speed

Attend = Callable[..., torch.Tensor]
"""Called with a Step, and what layers differ by (``cases.kinds``) by name."""

KERNELS = "services.worker.kernels"

SPEED_ROWS, SPEED_CONTEXT = 16, 2047


def prove_triton_attention(shape: ServedShape, package: str = KERNELS) -> Speed | None:
    """Prove the kernels of a package, such as ``services.worker.kernels``."""
    # Imported here: a worker without Triton, or one that cannot load, is told so and goes on.
    kernels: Any = importlib.import_module(package)

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        found: torch.Tensor = kernels.paged_attention(step.q, step.k, step.v, step.paged, **settings)
        return found

    return prove_attention(shape, attend)


def prove_torch_attention(shape: ServedShape) -> Speed | None:
    """``services.worker.engine.torch_attention``."""

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        tables = page_tables(step.segments, shape.geometry.page_size, step.q.device)
        return torch_attention(step.q, step.k, step.v, step.segments, tables, **settings)

    return prove_attention(shape, attend)


def prove_attention(shape: ServedShape, attend: Attend) -> Speed | None:
    """Any backend: decode, prompts and both together, in all kinds of layers that the model has. Its speed is that of
    K and V in decode.
    """
    scaling = shape.geometry.head_dim**-0.5
    for step in steps(shape):
        segments = [(each.rows, each.context) for each in step.segments]
        for kind in kinds(shape):
            what = f"attention of {segments} (rows, context) with {kind_name(kind)}"
            compare(attend(step, scaling=scaling, **kind), expected(step, scaling=scaling, **kind), what)
    return _decode_speed(shape, attend, scaling)


def _decode_speed(shape: ServedShape, attend: Attend, scaling: float) -> Speed | None:
    if not is_timed(shape.device):
        return None
    step = decode_step(shape, SPEED_ROWS, SPEED_CONTEXT)
    # A window that hides nothing, where all layers have one: it is compiled already.
    window = None if 0 in shape.windows else SPEED_CONTEXT + 1
    settings = {"scaling": scaling, "window": window, "softcap": shape.softcap or None}
    spent = seconds_of(lambda: attend(step, **settings), shape.device)
    nbytes = 2 * SPEED_ROWS * (SPEED_CONTEXT + 1) * step.k[0, 0].nbytes
    return None if spent is None else Speed(value=nbytes / spent / 1e9, unit="GB/s")


def prove_triton_kv_write(shape: ServedShape) -> Speed | None:
    """``services.worker.kernels.kv_write``, which captured steps write with: rows to their slots, padding nowhere."""
    kernels: Any = importlib.import_module("services.worker.kernels")
    step = make_step(shape, [(1, 40)] * 16)
    device, (slot_count, rows) = step.q.device, (step.k.shape[0] * step.k.shape[1], 16)
    random = torch.Generator().manual_seed(1)
    sizes = rows, step.k.shape[2], step.q.shape[2]
    k, v = (torch.randn(sizes, generator=random).to(step.q.dtype) for _ in range(2))
    slots = torch.randperm(slot_count, generator=random)[:rows]
    slots[3] = -1
    pools = step.k.clone(), step.v.clone()
    kernels.kv_write(k.to(device), v.to(device), *pools, slots.to(device))
    for rows_of, pool, before in ((k, pools[0], step.k), (v, pools[1], step.v)):
        oracle = before.cpu().clone()
        kept = to_float8(rows_of) if pool.dtype == torch.uint8 else rows_of
        oracle.flatten(0, 1)[slots[slots >= 0]] = kept[slots >= 0]
        compare_bytes(pool, oracle, "K and V written to their slots")
    return None


def prove_triton(shape: ServedShape) -> Speed | None:
    """Triton is there, finds what it compiles with, and its programs run: the smallest kernel that there is."""
    kernels: Any = importlib.import_module("services.worker.kernels.add_one")
    device = torch.device(shape.device)
    numbers = torch.arange(1000, dtype=torch.int32, device=device)
    found = torch.zeros_like(numbers)
    kernels.add_one(numbers, found)
    compare_bytes(found, torch.arange(1, 1001, dtype=torch.int32), "numbers and one")
    return None
