"""Proofs of attention over the paged pool, one for each backend, of writing K and V, and of Triton itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from services.worker.engine.torch_attention import page_tables, torch_attention
from services.worker.kv.float8 import to_float8
from services.worker.proving.cases import (
    Step,
    attended,
    attended_latents,
    compare,
    compare_bytes,
    decode_step,
    is_timed,
    kind_name,
    kinds,
    make_step,
    oracle_of,
    speed_of,
    steps,
)
from services.worker.proving.part import WrongResult
from services.worker.proving.table import ServedShape, Speed

Attend = Callable[..., torch.Tensor]
"""Called with a Step, and the settings of a kind of layer (``cases.kinds``) by name."""

KERNELS = "services.worker.kernels"

SPEED_ROWS, SPEED_CONTEXT = 16, 2047


def prove_triton_attention(shape: ServedShape, package: str = KERNELS) -> Speed | None:
    """Prove the kernels of a package, such as ``services.worker.kernels``."""
    # Imported here: without a Triton that loads, this is the way's fault, and the worker continues.
    kernels: Any = importlib.import_module(package)

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        found: torch.Tensor = kernels.paged_attention(step.q, step.k, step.v, step.paged, **settings)
        return found

    def attend_latents(step: Step, rank: int, **settings: Any) -> torch.Tensor:
        found: torch.Tensor = kernels.latent_attention(step.q, step.k, step.paged, rank=rank, **settings)
        return found

    return prove_attention(shape, attend, attend_latents)


def prove_torch_attention(shape: ServedShape) -> Speed | None:
    """Prove ``services.worker.engine.torch_attention``, in the place of kernels."""

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        tables = page_tables(step.segments, shape.geometry.page_size, step.q.device)
        return torch_attention(step.q, step.k, step.v, step.segments, tables, **settings)

    def attend_latents(step: Step, rank: int, **settings: Any) -> torch.Tensor:
        return attend(replace(step, v=step.k), **settings)[..., :rank]

    return prove_attention(shape, attend, attend_latents)


def prove_attention(shape: ServedShape, attend: Attend, attend_latents: Attend | None = None) -> Speed | None:
    """Prove a backend in decode, prompts and both together, in all kinds of layers that the model has.

    Its speed is that of K and V, or of latents, in decode. ``attend_latents`` is given their rank, too. Raises
    WrongResult.
    """
    speeds = [_prove_kind(each, attend, "attention") for each in attended(shape)]
    for each in attended_latents(shape):
        if attend_latents is None:
            raise WrongResult("it attends to no latents")
        of_rank = partial(attend_latents, rank=each.latents[0].rank)
        speeds.append(_prove_kind(each, of_rank, "attention to latents"))
    return speeds[-1]


def _prove_kind(shape: ServedShape, attend: Attend, name: str) -> Speed | None:
    scaling = shape.geometry.head_dim**-0.5
    for step in steps(shape):
        segments = [(each.rows, each.context) for each in step.segments]
        for kind in kinds(shape):
            what = f"{name} of {segments} (rows, context) with {kind_name(kind)}"
            oracle = oracle_of(shape, step, scaling=scaling, **kind)
            compare(attend(step, scaling=scaling, **kind), oracle, what)
    return _decode_speed(shape, attend, scaling)


def _decode_speed(shape: ServedShape, attend: Attend, scaling: float) -> Speed | None:
    if not is_timed(shape.device):
        return None
    halves = 1 if shape.latents else 2
    step = decode_step(shape, SPEED_ROWS, SPEED_CONTEXT)
    # Where all layers have a window, one that hides nothing: its variant is compiled already.
    window = None if 0 in shape.windows else SPEED_CONTEXT + 1
    settings = {"scaling": scaling, "window": window, "softcap": shape.softcap or None}
    nbytes = halves * SPEED_ROWS * (SPEED_CONTEXT + 1) * step.k[0, 0].nbytes
    return speed_of(lambda: attend(step, **settings), nbytes, shape.device)


def prove_triton_kv_write(shape: ServedShape) -> Speed | None:
    """Prove captured steps' ``kv_write`` and ``latent_write``: rows go to their slots, padding nowhere."""
    kernels: Any = importlib.import_module("services.worker.kernels")
    for each in attended(shape):
        _prove_write(each, kernels.kv_write, halves=2)
    for each in attended_latents(shape):
        _prove_write(each, kernels.latent_write, halves=1)
    return None


def _prove_write(shape: ServedShape, write: Callable[..., None], *, halves: int) -> None:
    """Prove ``write``, which is called with rows and pools of so many halves, and slots."""
    step = make_step(shape, [(1, 40)] * 16)
    device, (slot_count, rows) = step.q.device, (step.k.shape[0] * step.k.shape[1], 16)
    random = torch.Generator().manual_seed(1)
    sizes = rows, step.k.shape[2], step.q.shape[2]
    given = [torch.randn(sizes, generator=random).to(step.q.dtype) for _ in range(halves)]
    slots = torch.randperm(slot_count, generator=random)[:rows]
    slots[3] = -1
    before = [pool.cpu().clone(memory_format=torch.contiguous_format) for pool in (step.k, step.v)[:halves]]
    write(*(each.to(device) for each in given), *(step.k, step.v)[:halves], slots.to(device))
    for rows_of, pool, oracle in zip(given, (step.k, step.v), before, strict=False):
        kept = to_float8(rows_of) if pool.dtype == torch.uint8 else rows_of
        oracle.flatten(0, 1)[slots[slots >= 0]] = kept[slots >= 0]
        compare_bytes(pool.contiguous(), oracle, "rows written to their slots")


def prove_triton(shape: ServedShape) -> Speed | None:
    """Prove that Triton is installed, compiles, and that its programs run, with the smallest kernel."""
    kernels: Any = importlib.import_module("services.worker.kernels.add_one")
    device = torch.device(shape.device)
    numbers = torch.arange(1000, dtype=torch.int32, device=device)
    found = torch.zeros_like(numbers)
    kernels.add_one(numbers, found)
    compare_bytes(found, torch.arange(1, 1001, dtype=torch.int32), "numbers and one")
    return None
