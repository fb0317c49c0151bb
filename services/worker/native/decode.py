"""Decode attention (``decode.c``), compiled for one shape of heads when a worker loads its model.

Without it, or for a dtype that it lacks, the portable path of :mod:`services.worker.engine.cpu_attention` serves. It
uses OpenMP, whose threads it shares with torch.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.worker.native.build import NotCompiled, load
from shared.messages.pools import KvGeometry

ITEM_KEYS = 256
"""Keys of the largest item."""

_FLAGS = (
    "-fopenmp",
    # Enough freedom to vectorise sums; not -ffast-math, under which NaN may be lost.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-ffp-contract=fast"),
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The decode rows of one step under one window, as the C code reads them.

    tables int32 [n]: page tables one after the other. segments int32 [S, 4]: batch row, start in tables, first and last
    partial. items int32 [N, 4], in the order in which they are computed: segment, first and last key, partial.
    ``addresses`` are those of the three arrays, looked up once and not in every layer.
    """

    tables: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    addresses: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Set ``addresses``; the arrays are contiguous."""
        addresses = tuple(array.ctypes.data for array in (self.tables, self.segments, self.items))
        object.__setattr__(self, "addresses", addresses)


class NativeDecode:
    """The compiled function for one shape of heads and pages. Make it with :func:`compile_decode`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the functions of ``library``, which is ``decode.c`` compiled for one shape."""
        library.partial_bytes.restype = ctypes.c_int64
        self.partial_bytes = int(library.partial_bytes())
        self._partials = torch.empty(0, dtype=torch.uint8)
        self.function = library.decode
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.function.restype = None
        self.function.argtypes = [
            pointer, int64, int64, pointer, pointer, pointer, pointer, int32, pointer, int32, pointer, pointer,
            ctypes.c_float, int32, pointer,
        ]  # fmt: skip

    def attend(
        self,
        work: DecodeWork,
        query: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        output: torch.Tensor,
        scaling: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the rows of ``work`` into ``output`` [T, heads, head_dim], contiguous.

        query [heads, T, head_dim]; k_pool and v_pool [pages, page_size, kv_heads, head_dim], contiguous but for what
        lies between slots; they may be the same; sinks [heads]. Other rows of the output are left alone.
        """
        sinks = None if sinks is None else sinks.float().contiguous()
        if query.stride(2) != 1:
            query = query.contiguous()
        items, (tables_at, segments_at, items_at) = len(work.items), work.addresses
        if self._partials.numel() < items * self.partial_bytes:
            self._partials = torch.empty(2 * items * self.partial_bytes, dtype=torch.uint8)
        self.function(
            query.data_ptr(),
            query.stride(1),
            query.stride(0),
            k_pool.data_ptr(),
            v_pool.data_ptr(),
            tables_at,
            segments_at,
            len(work.segments),
            items_at,
            items,
            self._partials.data_ptr(),
            output.data_ptr(),
            scaling,
            torch.get_num_threads(),
            None if sinks is None else sinks.data_ptr(),
        )


def compile_decode(geometry: KvGeometry, query_heads: int, slot: int = 0) -> NativeDecode | None:
    """Compile the kernel, or load it from the cache of this user and machine; return None, announced, where that fails.

    ``slot`` is how many values lie from one slot of the pool to the next, 0 where nothing lies between them.
    """
    if geometry.dtype not in ("float32", "bfloat16"):
        return None
    constants = {
        "HEAD_DIM": geometry.head_dim,
        "KV_HEADS": geometry.kv_heads,
        "GROUP": query_heads // geometry.kv_heads,
        "SLOT": slot or geometry.kv_heads * geometry.head_dim,
        "PAGE_SIZE": geometry.page_size,
        "ITEM_KEYS": ITEM_KEYS,
        "BFLOAT16": int(geometry.dtype == "bfloat16"),
    }
    try:
        return NativeDecode(load("decode", _FLAGS, constants, {}))
    except NotCompiled:
        return None
