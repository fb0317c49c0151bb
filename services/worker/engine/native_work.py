"""The part of a step for the compiled attention kernels: segments in the form that these read."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.forward_meta import ForwardMeta, pages_for
from services.worker.engine.visibility import first_visible
from services.worker.native.decode import ITEM_KEYS, DecodeWork
from services.worker.native.extend import ROWS, SPAN_KEYS, TILE_ROWS, ExtendWork, Tiling

_UNITS_A_THREAD = 2
"""Units a thread, for steps of few rows: enough to keep all threads at work, where more tiles would pack the same keys
more often.
"""

_MOST_PARTS = 2048
"""Parts of a step, all KV heads' counted: 130 MB at 64 dimensions."""


def find_decode_work(meta: ForwardMeta, window: int | None, chunk: int | None = None) -> DecodeWork | None:
    """Return the step's segments of a single row; None if it has none.

    Items begin at multiples of ``ITEM_KEYS``, so a request's items are the same in any batch. Neighbouring rows of one
    request, which prompt lookup proposes, have one table and take the keys of an item one after the other.
    """
    tables: list[npt.NDArray[np.int32]] = []
    segments: list[tuple[int, int, int, int]] = []
    items: list[tuple[int, int, int, int]] = []
    row = offset = first_of_table = 0
    for segment in meta.segments:
        if segment.rows == 1:
            if not tables or tables[-1] is not segment.pages:
                _put_same_keys_together(items, first_of_table)
                first_of_table, offset = len(items), offset + (len(tables[-1]) if tables else 0)
                tables.append(segment.pages)
            first, last = first_visible(segment.context, window, chunk), segment.length
            edges = [first, *range(first - first % ITEM_KEYS + ITEM_KEYS, last, ITEM_KEYS), last]
            segments.append((row, offset, len(items), len(items) + len(edges) - 1))
            items += [(len(segments) - 1, *edge, n) for n, edge in enumerate(itertools.pairwise(edges), len(items))]
        row += segment.rows
    if not segments:
        return None
    _put_same_keys_together(items, first_of_table)
    return DecodeWork(
        np.concatenate(tables).astype(np.int32, copy=False),
        np.array(segments, dtype=np.int32),
        np.array(items, dtype=np.int32),
    )


def _put_same_keys_together(items: list[tuple[int, int, int, int]], first: int) -> None:
    """Order ``items`` from ``first`` on, whose rows read through one table, by the block that their keys lie in."""
    if len(items) > first and items[first][0] != items[-1][0]:
        items[first:] = sorted(items[first:], key=lambda item: item[1] // ITEM_KEYS)


def find_extend_work(
    meta: ForwardMeta, window: int | None, group: int, kv_heads: int, chunk: int | None = None, least_rows: int = 2
) -> ExtendWork | None:
    """Return the step's segments of ``least_rows`` rows or more; None if it has none.

    ``group`` is the number of query heads to a KV head.
    """
    tables: list[npt.NDArray[np.int32]] = []
    segments: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int, int]] = []
    bounds = np.zeros((1, meta.rows, 2), dtype=np.int32)
    row = offset = 0
    for segment in meta.segments:
        if segment.rows >= least_rows:
            pages = segment.pages[: pages_for(segment.length, meta.page_size)]
            spans.append((len(segments), row, row + segment.rows))
            segments.append((offset, segment.length, 0))
            tables.append(pages)
            offset += len(pages)
            ends = np.arange(segment.context + 1, segment.length + 1)
            bounds[0, row : row + segment.rows, 1] = ends
            if window is not None:
                bounds[0, row : row + segment.rows, 0] = np.maximum(0, ends - window)
            if chunk is not None:
                bounds[0, row : row + segment.rows, 0] = (ends - 1) // chunk * chunk
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
    """Return the work of one segment of ``rows`` rows after ``context`` tokens, over keys that lie one after the other.

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


def cut_tiles(ranges: list[tuple[int, int, int]], bounds: npt.NDArray[np.int32], group: int, kv_heads: int) -> Tiling:
    """Cut ``ranges`` (segment, first and last row) into tiles and units, those with most work first.

    A range of few rows that see many keys is cut along its keys, others along their rows alone. The cuts change no
    result, only how well threads are occupied.
    """
    step = ROWS // math.gcd(ROWS, group)  # Tokens whose rows fill whole packs.
    most = max(1, TILE_ROWS // group)
    most = most // step * step or most
    costs = [(last - first) * _keys(bounds, first, last) for _, first, last in ranges]
    wanted = -(-_UNITS_A_THREAD * torch.get_num_threads() // kv_heads)
    tiles: list[tuple[int, int, int, int, int, int]] = []
    units: list[tuple[int, int, int, int]] = []
    parts = 0
    for (segment, first, last), cost in zip(ranges, costs, strict=True):
        fair = -(-wanted * cost // sum(costs))
        spans = len(_spans(bounds, first, last))
        tokens = -(-(last - first) // -(-fair // spans))
        tokens = min(-(-tokens // step) * step, most)
        starts = range(first, last, tokens)
        is_split = len(starts) < fair and (parts + len(starts) * spans) * kv_heads <= _MOST_PARTS
        for start in starts:
            end = min(start + tokens, last)
            seen = _spans(bounds, start, end)
            count = len(seen) if is_split and len(seen) > 1 else 0
            if count:
                units += [(len(tiles), span, span + 1, part) for part, span in enumerate(seen, parts)]
            else:
                units.append((len(tiles), seen.start, seen.stop, -1))
            tiles.append((segment, start, end, seen.start, parts, parts + count))
            parts += count
    units.sort(key=lambda unit: (unit[1] - unit[2]) * (tiles[unit[0]][2] - tiles[unit[0]][1]))
    return Tiling(np.array(tiles, dtype=np.int32), np.array(units, dtype=np.int32), parts)


def _keys(bounds: npt.NDArray[np.int32], first: int, last: int) -> int:
    """Return how many keys rows [first, last) of a segment see."""
    return int(bounds[:, last - 1, 1].max()) - int(bounds[:, first, 0].min())


def _spans(bounds: npt.NDArray[np.int32], first: int, last: int) -> range:
    """Return the spans that the keys of rows [first, last) lie in."""
    return range(int(bounds[:, first, 0].min()) // SPAN_KEYS, -(-int(bounds[:, last - 1, 1].max()) // SPAN_KEYS))
