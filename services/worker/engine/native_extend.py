"""Prefill attention in C, compiled for this machine and this shape of heads when a worker loads its model.

Optional, as :mod:`services.worker.engine.native_decode` is: without a C compiler, or for a dtype it lacks, the portable
path of :mod:`services.worker.engine.cpu_attention` serves alone. Soft-capped scores are left to that one too.
"""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.forward_meta import ForwardMeta, pages_for
from services.worker.engine.native_extend_source import KEYS, ROWS, SOURCE, TILE_ROWS
from services.worker.native_build import build
from shared.logs import get_logger

# Vectors are written out in the source, so sums need no freedom to be reordered: rounding is as the source has it.
_FLAGS = [
    *("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
]
_TILES_A_THREAD = 2
"""A tile packs all keys that it sees; this many for each thread and KV head are enough to keep all threads at work."""


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """Some segments of a step under one window, as the C code reads them.

    tables int32 [n]: page tables one after the other. segments int32 [S, 3]: start in tables, number of keys, position
    of the first key. tiles int32 [N, 3]: segment, first and last row of the batch. bounds int32 [kv_heads or 1, T, 2]:
    the first position that a row sees and the one behind its last, for each KV head or for all. ``addresses`` are
    theirs, asked for once and not in every layer.
    """

    tables: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32]
    tiles: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int32]
    addresses: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        arrays = (self.tables, self.segments, self.tiles, self.bounds)
        object.__setattr__(self, "addresses", tuple(array.ctypes.data for array in arrays))


def find_extend_work(meta: ForwardMeta, window: int | None, group: int, kv_heads: int) -> ExtendWork | None:
    """The step's segments of more than one row; None if it has none. ``group``: query heads of one KV head."""
    tables: list[npt.NDArray[np.int32]] = []
    segments: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int, int]] = []
    bounds = np.zeros((1, meta.rows, 2), dtype=np.int32)
    row = offset = 0
    for segment in meta.segments:
        if segment.rows > 1:
            pages = segment.pages[: pages_for(segment.length, meta.page_size)]
            spans.append((len(segments), row, row + segment.rows))
            segments.append((offset, segment.length, 0))
            tables.append(pages)
            offset += len(pages)
            ends = np.arange(segment.context + 1, segment.length + 1)
            bounds[0, row : row + segment.rows, 1] = ends
            if window is not None:
                bounds[0, row : row + segment.rows, 0] = np.maximum(0, ends - window)
        row += segment.rows
    if not segments:
        return None
    return ExtendWork(
        np.concatenate(tables).astype(np.int32, copy=False),
        np.array(segments, dtype=np.int32),
        cut_tiles(spans, bounds, group, kv_heads),
        bounds,
    )


def find_selected_work(
    positions: npt.NDArray[np.int64], context: int, rows: int, window: int | None, group: int, kv_heads: int
) -> ExtendWork:
    """Work of one segment of ``rows`` rows after ``context`` tokens, over keys that lie one after the other.

    positions int64 [kv_heads or 1, n]: where the keys of each KV head stand, ascending; the last ``rows`` of them are
    the rows themselves. They are blocked as if nothing lay between them, so all keys of a prefix are blocked as
    :func:`find_extend_work` does it.
    """
    count = positions.shape[1]
    shift = context + rows - count
    at = np.arange(context, context + rows)
    bounds = np.empty((len(positions), rows, 2), dtype=np.int32)
    for head, places in enumerate(positions):
        bounds[head, :, 0] = 0 if window is None else np.searchsorted(places, at - window, side="right")
        bounds[head, :, 1] = np.searchsorted(places, at, side="right")
    bounds += shift
    return ExtendWork(
        np.zeros(1, dtype=np.int32),
        np.array([(0, count, shift)], dtype=np.int32),
        cut_tiles([(0, 0, rows)], bounds, group, kv_heads),
        bounds,
    )


def cut_tiles(
    spans: list[tuple[int, int, int]], bounds: npt.NDArray[np.int32], group: int, kv_heads: int
) -> npt.NDArray[np.int32]:
    """Cut ``spans`` (segment, first and last row) into tiles, those with most keys first; int32 [N, 3].

    How they are cut changes no result, only how well threads are occupied.
    """
    step = ROWS // math.gcd(ROWS, group)  # Tokens whose rows fill whole packs.
    rows = sum(last - first for _, first, last in spans)
    wanted = -(-rows * kv_heads // (_TILES_A_THREAD * torch.get_num_threads()))
    most = max(1, TILE_ROWS // group)
    tokens = min(-(-wanted // step) * step, most // step * step or most)
    tiles = [
        (segment, start, min(start + tokens, last))
        for segment, first, last in spans
        for start in range(first, last, tokens)
    ]
    tiles.sort(key=lambda tile: int(bounds[0, tile[1], 0]) - int(bounds[0, tile[2] - 1, 1]))
    return np.array(tiles, dtype=np.int32)


class NativeExtend:
    """The compiled function for one head dimension, group and dtype. Make it with :func:`compile_extend`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._extend = library.extend
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._extend.restype = None
        self._extend.argtypes = [
            pointer, int64, int64, pointer, pointer, int64, int64, int32, int32, pointer, pointer, pointer, int32,
            pointer, int64, pointer, ctypes.c_float, int32,
        ]  # fmt: skip

    def attend(
        self,
        work: ExtendWork,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        scaling: float,
    ) -> None:
        """Write the rows of ``work`` into ``output`` [T, heads, head_dim], contiguous. Other rows are left alone.

        query [heads, T, head_dim]; k and v [pages, page_size, kv_heads, head_dim], of equal strides, pages one after
        the other. ``scaling`` is positive.
        """
        if query.stride(2) != 1:
            query = query.contiguous()
        bounds, (tables_at, segments_at, tiles_at, bounds_at) = work.bounds, work.addresses
        self._extend(
            query.data_ptr(),
            query.stride(1),
            query.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(1),
            k.stride(2),
            k.shape[1],
            k.shape[2],
            tables_at,
            segments_at,
            tiles_at,
            len(work.tiles),
            bounds_at,
            0 if len(bounds) == 1 else bounds.shape[1] * 2,
            output.data_ptr(),
            scaling,
            torch.get_num_threads(),
        )


@functools.lru_cache(maxsize=64)
def compile_extend(head_dim: int, group: int, dtype: torch.dtype) -> NativeExtend | None:
    """Compile, or take from the cache of this user and machine. None, with a line in the log, where it cannot be."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    constants = {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BFLOAT16": int(dtype == torch.bfloat16),
        "KEYS": KEYS,
        "ROWS": ROWS,
        "TILE_ROWS": TILE_ROWS,
    }
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in constants.items())]
    try:
        return NativeExtend(ctypes.CDLL(str(build("extend", SOURCE, flags))))
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        get_logger("worker.engine").info("native_extend_unavailable", reason=str(error))
        return None
