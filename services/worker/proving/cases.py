"""Steps of attention for proofs, and their expected results: KV in shuffled pages of a pool, NaN elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.engine.forward_meta import PagedTensors, Segment, paged_tensors, pages_for
from services.worker.kv.device_pool import TORCH_DTYPES, kept_as
from services.worker.kv.float8 import from_float8, to_float8
from services.worker.proving.part import WrongResult
from services.worker.proving.table import HeadsShape, ServedShape, Speed
from shared.messages.pools import KvGeometry

STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 0), (1, 511), (1, 1300), (1, 2)),
    ((130, 0), (17, 40)),
    ((1, 900), (40, 600), (1, 2), (64, 0)),
)
"""(rows, context) of each step's segments: decode alone, with keys that are split among programs; prompts; both."""

SHARED_TOKENS = 1024
SHARED_STEP = ((1, 1300), (1, 1024), (1, 1100), (1, 1250), (1, 1299), (1, 1025), (1, 1150), (3, 1200))
"""Requests whose first tokens, so many, are in the same pages."""

SHORT_WINDOW = 100
"""The model's windows are cut to this, so that they hide something from these steps."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest deviation of one value, absolute and relative: rounding of the result, not of a different sum."""


@dataclass(frozen=True)
class Step:
    """A step over one layer, with q [T, heads, head_dim], k and v.

    k and v are [pages, page_size, kv_heads, head_dim], or of bytes, head_bytes, where they are rounded, with the
    strides of a pool's layer.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    segments: tuple[Segment, ...]
    paged: PagedTensors


def make_step(
    shape: ServedShape, segments: Sequence[tuple[int, int]], *, seed: int = 0, shared_tokens: int = 0
) -> Step:
    """Make a step of ``segments``, each (rows, context).

    Slots that hold no token of it are NaN, so that a read of one shows. All segments share the pages of the first
    ``shared_tokens``, as far as those are whole.
    """
    geometry, random = shape.geometry, np.random.default_rng(seed)
    values = geometry.kv_heads * geometry.head_dim
    page_size, device = geometry.page_size, torch.device(shape.device)
    counts = [pages_for(rows + context, page_size) for rows, context in segments]
    order = random.permutation(sum(counts) + 3).astype(np.int32)
    halves = np.full((2, len(order) * page_size, _row_values(shape)), np.nan, dtype=np.float32)
    made: list[Segment] = []
    taken = 0
    for (rows, context), count in zip(segments, counts, strict=True):
        pages = order[taken : taken + count].copy()
        taken += count
        common = shared_tokens // page_size if made else 0
        pages[:common] = made[0].pages[:common] if made else pages[:common]
        slots = (pages[:, None].astype(np.int64) * page_size + np.arange(page_size)).reshape(-1)[: rows + context]
        slots = slots[common * page_size :]
        halves[:, slots, :values] = random.standard_normal((2, len(slots), values), dtype=np.float32)
        made.append(Segment(rows, context, pages))
    dtype = TORCH_DTYPES[shape.computed_dtype]
    # The second of two layers, as far into the pool as layers are.
    pool = torch.from_numpy(np.stack([np.full_like(halves, np.nan), halves])).to(dtype)
    k, v = _heads(_kept(pool, geometry).to(device)[1].view(2, len(order), page_size, -1), geometry)
    total = sum(rows for rows, _ in segments)
    # Models pass Q as [heads, T, head_dim], transposed.
    q = torch.from_numpy(random.standard_normal((shape.query_heads, total, geometry.head_dim), dtype=np.float32))
    return Step(
        q.to(dtype).to(device).transpose(0, 1), k, v, tuple(made), paged_tensors(made, page_size, device)
    )  # fmt: skip


def steps(shape: ServedShape) -> Iterator[Step]:
    """Yield all steps that attention is proven with."""
    for segments in STEPS:
        yield make_step(shape, segments)
    yield make_step(shape, SHARED_STEP, shared_tokens=SHARED_TOKENS)


def decode_step(shape: ServedShape, rows: int, context: int) -> Step:
    """Return a decode step of ``rows`` requests over zeros, to time it: on the device, too large for its cache."""
    geometry, device = shape.geometry, torch.device(shape.device)
    count, dtype = pages_for(context + 1, geometry.page_size), TORCH_DTYPES[shape.computed_dtype]
    pages = np.arange(rows * count, dtype=np.int32).reshape(rows, count)
    segments = tuple(Segment(1, context, each) for each in pages)
    kind, width = kept_as(geometry)
    row = geometry.kv_heads * width if geometry.is_rounded else _row_values(shape)
    k, v = _heads(torch.zeros((2, rows * count, geometry.page_size, row), dtype=kind, device=device), geometry)
    q = torch.zeros((rows, shape.query_heads, geometry.head_dim), dtype=dtype, device=device)
    return Step(q, k, v, segments, paged_tensors(segments, geometry.page_size, device))


def attended(shape: ServedShape) -> Iterator[ServedShape]:
    """Yield ``shape`` for each kind of K and V: with one kind of heads, in its geometry, too."""
    if shape.is_uniform:
        yield shape
    for heads in shape.heads:
        yield _of_heads(msgspec.structs.replace(shape, latents=()), heads)


def attended_latents(shape: ServedShape) -> Iterator[ServedShape]:
    """Yield ``shape`` for each kind of latents, as K of one head that is as wide as they are."""
    for kept in shape.latents:
        heads = HeadsShape(
            query_heads=kept.query_heads, kv_heads=1, head_dim=kept.rank + kept.rope, row_values=kept.row_values
        )
        yield _of_heads(msgspec.structs.replace(shape, latents=(kept,)), heads)


def _of_heads(shape: ServedShape, heads: HeadsShape) -> ServedShape:
    geometry = msgspec.structs.replace(shape.geometry, kv_heads=heads.kv_heads, head_dim=heads.head_dim)
    return msgspec.structs.replace(shape, geometry=geometry, query_heads=heads.query_heads, heads=(heads,))


def _row_values(shape: ServedShape) -> int:
    """Return the values of a row of K or V in its page."""
    return shape.heads[0].row_values if shape.heads else shape.geometry.kv_heads * shape.geometry.head_dim


def _kept(rows: torch.Tensor, geometry: KvGeometry) -> torch.Tensor:
    """Return rows [..., kv_heads * head_dim] as pools keep them."""
    if not geometry.is_rounded:
        return rows
    heads = rows.view(*rows.shape[:-1], geometry.kv_heads, geometry.head_dim)
    return to_float8(heads).flatten(-2)


def _heads(halves: torch.Tensor, geometry: KvGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V ``[pages, page_size, kv_heads, head_dim]`` in ``halves`` [2, pages, page_size, row values]."""
    pages, page_size, row = halves.shape[1:]
    _, width = kept_as(geometry)
    sizes = (pages, page_size, geometry.kv_heads, width)
    strides = (page_size * row, row, width, 1)
    k, v = (half.as_strided(sizes, strides) for half in halves)
    return k, v


def kinds(shape: ServedShape) -> list[dict[str, Any]]:
    """Return each kind of layer: window, softcap, chunk and sinks, as attention takes them by name."""
    bounds: list[tuple[int | None, int | None]] = [
        (min(window, SHORT_WINDOW) or None, None) for window in shape.windows
    ]
    bounds += [(None, min(chunk, SHORT_WINDOW)) for chunk in shape.chunks]
    sinks: list[torch.Tensor | None] = [None]
    if shape.has_sinks:  # Some layers of a model may have none.
        spread = torch.linspace(-3.0, 6.0, shape.query_heads)
        sinks.append(spread.to(TORCH_DTYPES[shape.computed_dtype]).to(torch.device(shape.device)))
    return [
        {"window": window, "softcap": shape.softcap or None, "chunk": chunk, "sinks": each}
        for window, chunk in bounds
        for each in sinks
    ]


def kind_name(kind: Mapping[str, Any]) -> str:
    """Return the window or chunk of such a layer, and whether it has sinks, for messages."""
    sinks = " and sinks" if kind["sinks"] is not None else ""
    if kind["chunk"] is not None:
        return f"chunks of {kind['chunk']}{sinks}"
    return f"window {kind['window'] or 'none'}{sinks}"


def expected(
    step: Step,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the expected output of a step, [T, heads, head_dim], on the CPU in float64, each segment whole."""
    k, v = (values_of(half, step.q.shape[2]).cpu().flatten(0, 1) for half in (step.k, step.v))
    page_size, kv_heads = step.k.shape[1], step.k.shape[2]
    q = step.q.cpu().double().reshape(len(step.q), kv_heads, -1, step.q.shape[2])
    parts, first = [], 0
    for segment in step.segments:
        pages = torch.from_numpy(segment.pages.astype(np.int64))
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[: segment.length]
        scores = torch.einsum("tkgd,nkd->tkgn", q[first : first + segment.rows], k[slots].double()) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at, keys = torch.arange(segment.context, segment.length)[:, None], torch.arange(segment.length)
        seen = keys <= at if window is None else (keys <= at) & (keys > at - window)
        if chunk is not None:
            seen = seen & (keys // chunk == at // chunk)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        if sinks is not None:
            sink = sinks.cpu().double().view(kv_heads, -1, 1).expand(len(scores), -1, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : segment.length]
        parts.append(torch.einsum("tkgn,nkd->tkgd", weights, v[slots].double()).flatten(1, 2))
        first += segment.rows
    return torch.cat(parts)


def values_of(kept: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the values that a pool, or a part of one, holds: [..., head_dim]."""
    return from_float8(kept, head_dim, torch.float32) if kept.dtype == torch.uint8 else kept


def oracle_of(shape: ServedShape, step: Step, **settings: Any) -> torch.Tensor:
    """Return :func:`expected` of a step of a shape with one kind of heads.

    For latents, whose values are their first part, return the first ``rank`` columns.
    """
    if not shape.latents:
        return expected(step, **settings)
    return expected(replace(step, v=step.k), **settings)[..., : shape.latents[0].rank]


def compare(found: torch.Tensor, oracle: torch.Tensor, what: str) -> None:
    """Raise WrongResult where ``found`` differs from ``oracle`` in shape, or by more than rounding."""
    tolerance = TOLERANCE[found.dtype]
    values = found.detach().cpu().double()
    if values.shape != oracle.shape:
        raise WrongResult(f"{what}: shape {tuple(values.shape)} in the place of {tuple(oracle.shape)}")
    deviation = (values - oracle).abs()
    # NaN is not below anything either.
    right = deviation <= tolerance + tolerance * oracle.abs()
    if not bool(right.all()):
        wrong = int((~right).sum())
        largest = float(deviation.nan_to_num(nan=float("inf")).max())
        raise WrongResult(f"{what}: {wrong} of {right.numel()} values differ, by up to {largest:.3g}")


def compare_bytes(found: torch.Tensor, oracle: torch.Tensor, what: str) -> None:
    """Raise WrongResult unless both have the same bits."""
    different = int((found.cpu().view(torch.uint8) != oracle.cpu().view(torch.uint8)).sum())
    if different:
        raise WrongResult(f"{what}: {different} of {oracle.nbytes} bytes differ")


def is_timed(device: str) -> bool:
    """Return whether a proof also reports its speed: figures of a CPU that plays a GPU mean nothing."""
    return torch.device(device).type == "cuda"


def seconds_of(work: Callable[[], object], device: str, *, rounds: int = 5) -> float | None:
    """Return the fastest of some runs, in seconds, until the device has done all work; None where nothing is timed."""
    if not is_timed(device):
        return None
    # torch leaves these functions without types.
    cuda: Any = torch.cuda
    work()
    best = float("inf")
    for _ in range(rounds):
        cuda.synchronize()
        began_s = time.perf_counter()
        work()
        cuda.synchronize()
        best = min(best, time.perf_counter() - began_s)
    return best


def speed_of(work: Callable[[], object], nbytes: int, device: str, *, rounds: int = 5) -> Speed | None:
    """Return the speed of ``work``, which reads and writes ``nbytes``; None where nothing is timed."""
    spent = seconds_of(work, device, rounds=rounds)
    return None if spent is None else Speed(value=nbytes / spent / 1e9, unit="GB/s")
