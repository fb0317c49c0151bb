"""Prefill attention (``extend.c``), compiled for one shape of heads when a worker loads its model.

Without it, or for a dtype that it lacks, the portable path of :mod:`services.worker.engine.cpu_attention` serves.
Soft-capped scores are left to that path too.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.worker.native.build import NotCompiled, load

KEYS = 64
"""Keys of a block."""

ROWS = 6
"""Query rows that pass over a block together, in registers."""

TILE_ROWS = 192
"""Query rows of the largest tile, each head's counted: its output (48 KiB at 64 dimensions) stays in the L2 cache."""

SPAN_KEYS = 4096
"""Keys that are summed before their sums are merged with those of keys before them: a multiple of ``KEYS``."""

# Vectors are written out in the source, so sums need no freedom to be reordered: rounding is as the source has it.
_FLAGS = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows cut into tiles, and tiles with their keys into units; a thread takes one at a time.

    tiles int32 [N, 6]: segment, first and last row of the batch, first span, first and last part. units int32 [U, 4]:
    tile, first and last span, and the part of a unit that has one span of several, or -1. Span i begins at position
    ``i * SPAN_KEYS``.
    """

    tiles: npt.NDArray[np.int32]
    units: npt.NDArray[np.int32]
    parts: int


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """Some segments of a step under one window, as the C code reads them.

    tables int32 [n]: page tables one after the other. segments int32 [S, 3]: start in tables, number of keys, position
    of the first key. bounds int32 [kv_heads or 1, T, 2]: the first position that a row sees and the one behind its
    last, for each KV head or for all. ``addresses`` are those of these arrays and of the tiling's, looked up once and
    not in every layer.
    """

    tables: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32]
    tiling: Tiling
    bounds: npt.NDArray[np.int32]
    addresses: tuple[int, int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Set ``addresses``; the arrays, those of the tiling included, are contiguous."""
        arrays = (self.tables, self.segments, self.tiling.tiles, self.tiling.units, self.bounds)
        object.__setattr__(self, "addresses", tuple(array.ctypes.data for array in arrays))


class NativeExtend:
    """The compiled function for one head dimension, group and dtype. Make it with :func:`compile_extend`.

    Not thread-safe: the memory for partial results is reused by the next call.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the functions of ``library``, which is ``extend.c`` compiled for one shape."""
        library.part_bytes.restype = ctypes.c_int64
        self._part_bytes = int(library.part_bytes())
        self._parts = torch.empty(0, dtype=torch.uint8)
        self._extend = library.extend
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._extend.restype = None
        self._extend.argtypes = [
            pointer, int64, int64, pointer, pointer, int64, int64, int32, int32, pointer, pointer, pointer, int32,
            pointer, int32, pointer, int64, pointer, pointer, ctypes.c_float, int32, pointer,
        ]  # fmt: skip

    def attend(
        self,
        work: ExtendWork,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        scaling: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the rows of ``work`` into ``output`` [T, heads, head_dim], contiguous. Other rows are left alone.

        query [heads, T, head_dim]; k and v [pages, page_size, kv_heads, head_dim], or head_bytes where they are
        rounded, of equal strides, pages one after the other; sinks [heads]. ``scaling`` is positive.
        """
        sinks = None if sinks is None else sinks.float().contiguous()
        if query.stride(2) != 1:
            query = query.contiguous()
        bounds, (tables_at, segments_at, tiles_at, units_at, bounds_at) = work.bounds, work.addresses
        parts_bytes = work.tiling.parts * k.shape[2] * self._part_bytes
        if self._parts.numel() < parts_bytes:  # torch aligns it to 64 bytes.
            self._parts = torch.empty(parts_bytes, dtype=torch.uint8)
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
            len(work.tiling.tiles),
            units_at,
            len(work.tiling.units),
            bounds_at,
            0 if len(bounds) == 1 else bounds.shape[1] * 2,
            self._parts.data_ptr(),
            output.data_ptr(),
            scaling,
            torch.get_num_threads(),
            None if sinks is None else sinks.data_ptr(),
        )


@functools.lru_cache(maxsize=64)
def compile_extend(head_dim: int, group: int, dtype: torch.dtype, *, is_rounded: bool = False) -> NativeExtend | None:
    """Compile the kernel, or load it from the cache of this user and machine; return None, announced, where that fails.

    ``dtype`` is that of queries and output, and of K and V unless the pool ``is_rounded``.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    constants = {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BFLOAT16": int(dtype == torch.bfloat16),
        "ROUNDED": int(is_rounded),
        "KEYS": KEYS,
        "ROWS": ROWS,
        "TILE_ROWS": TILE_ROWS,
        "SPAN_KEYS": SPAN_KEYS,
    }
    try:
        return NativeExtend(load("extend", _FLAGS, constants, {}))
    except NotCompiled:
        return None
