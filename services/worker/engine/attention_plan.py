"""How portable CPU attention walks a step: which keys each block of query rows reads, and from where. Pure arithmetic.

Prefill goes in blocks of at most ``BLOCK_ROWS`` query rows, each over the keys that its last row may see, so no
mask is larger than one block and no key beyond the diagonal or before the window costs anything.
A sliding window ``w`` lets row i see keys ``i - w < j <= i``. Blocks end where a chunk does
(:mod:`~services.worker.engine.visibility`), so that all rows of one see keys of the same chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.engine.visibility import first_visible, most_visible

BLOCK_ROWS = 256
"""Larger blocks compute more beyond the diagonal, smaller ones spend more on dispatch; 128 to 512 are alike."""


Mask = Literal["none", "triangle", "band"]
"""``none``: every row sees every key. ``triangle``: row i sees keys 0 to i of the block. ``band``: the general rule."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Query rows ``[row_start, row_end)`` of the batch over keys ``[key_start, key_end)``.

    Keys are counted from the first key of the block's :class:`SegmentPlan`. ``diagonal`` is the key at the position of
    the first row, from ``key_start``.
    """

    row_start: int
    row_end: int
    key_start: int
    key_end: int
    diagonal: int
    mask: Mask


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Where one segment's keys are: ``keys`` consecutive rows from ``first`` of one of three sources.

    ``pool``: slots of the pool itself, when the pages are consecutive. ``gather``: slots of the gather buffer.
    ``batch``: the batch's own K and V, for a prompt without context whose pages are not consecutive.
    """

    source: Literal["pool", "gather", "batch"]
    first: int
    keys: int
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All segments of a step under one bound. ``gather_pages`` (int64) fill the gather buffer in this order."""

    segments: tuple[SegmentPlan, ...]
    gather_pages: npt.NDArray[np.int64]


def plan_attention(
    meta: ForwardMeta,
    window: int | None,
    chunk: int | None = None,
    *,
    whole_prompts: bool,
    single_rows: bool = True,
) -> AttentionPlan:
    """Plan the step ``meta`` for layers with this window or chunk (None: full attention).

    ``whole_prompts``: a prompt without context may go as one block under the triangle mask, because the kernel
    skips the upper triangle by itself. ``single_rows``: decode is planned too, not left to another kernel.
    """
    plans: list[SegmentPlan] = []
    gather: list[npt.NDArray[np.int32]] = []
    gathered_slots = row = 0
    for segment in meta.segments:
        if segment.rows == 1 and not single_rows:
            row += 1
            continue
        start = first_visible(segment.context, window, chunk)  # Position of the first key read.
        first_page, end_page = start // meta.page_size, pages_for(segment.length, meta.page_size)
        pages = segment.pages[first_page:end_page]
        offset = start - first_page * meta.page_size
        sees_all = most_visible(segment.length, window, chunk) == segment.length
        if whole_prompts and segment.context == 0 and sees_all:
            mask: Mask = "triangle" if segment.rows > 1 else "none"
            blocks: tuple[QueryBlock, ...] = (QueryBlock(row, row + segment.rows, 0, segment.rows, 0, mask),)
        else:
            blocks = tuple(_blocks(segment, row, start, window, chunk))
        keys = segment.length - start
        if _are_consecutive(pages):
            plans.append(SegmentPlan("pool", int(pages[0]) * meta.page_size + offset, keys, blocks))
        elif segment.context == 0:
            plans.append(SegmentPlan("batch", row, keys, blocks))
        else:
            plans.append(SegmentPlan("gather", gathered_slots + offset, keys, blocks))
            gather.append(pages)
            gathered_slots += len(pages) * meta.page_size
        row += segment.rows
    pages_to_gather = np.concatenate(gather).astype(np.int64) if gather else np.empty(0, dtype=np.int64)
    return AttentionPlan(tuple(plans), pages_to_gather)


def _blocks(segment: Segment, row: int, start: int, window: int | None, chunk: int | None) -> Iterator[QueryBlock]:
    """Yield the blocks of a segment with rows from batch row ``row`` and keys from position ``start``."""
    block_start = 0
    while block_start < segment.rows:
        position = segment.context + block_start
        rows = min(BLOCK_ROWS, segment.rows - block_start)
        if chunk is not None:
            rows = min(rows, chunk - position % chunk)
        lowest = max(start, first_visible(position, window, chunk))
        yield QueryBlock(
            row_start=row + block_start,
            row_end=row + block_start + rows,
            key_start=lowest - start,
            key_end=position + rows - start,
            diagonal=position - lowest,
            mask="band" if rows > 1 else "none",  # A second row sees one key more than the first.
        )
        block_start += rows


def _are_consecutive(pages: npt.NDArray[np.int32]) -> bool:
    count = len(pages)
    return count == 1 or (int(pages[-1]) - int(pages[0]) == count - 1 and bool((np.diff(pages) == 1).all()))
