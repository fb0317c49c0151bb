"""What of a step goes to the compiled attention kernels: its segments as they read them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.forward_meta import ForwardMeta, pages_for
from services.worker.native.decode import ITEM_KEYS, DecodeWork
from services.worker.native.extend import ROWS, TILE_ROWS, ExtendWork

_TILES_A_THREAD = 2
"""A tile packs all keys that it sees; this many for each thread and KV head are enough to keep all threads at work."""


def find_decode_work(meta: ForwardMeta, window: int | None) -> DecodeWork | None:
    """The step's segments of a single row; None if it has none.

    Items begin at multiples of ``ITEM_KEYS``, so a request's items are the same in any batch.
    """
    tables: list[npt.NDArray[np.int32]] = []
    segments: list[tuple[int, int, int, int]] = []
    items: list[tuple[int, int, int]] = []
    row = offset = 0
    for segment in meta.segments:
        if segment.rows == 1:
            first, last = 0 if window is None else max(0, segment.length - window), segment.length
            edges = [first, *range(first - first % ITEM_KEYS + ITEM_KEYS, last, ITEM_KEYS), last]
            segments.append((row, offset, len(items), len(items) + len(edges) - 1))
            items += [(len(segments) - 1, *edge) for edge in itertools.pairwise(edges)]
            tables.append(segment.pages)
            offset += len(segment.pages)
        row += segment.rows
    if not segments:
        return None
    return DecodeWork(
        np.concatenate(tables).astype(np.int32, copy=False),
        np.array(segments, dtype=np.int32),
        np.array(items, dtype=np.int32),
    )


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
