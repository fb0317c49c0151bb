"""What of a step goes to the compiled attention kernels."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.native_work import cut_tiles, find_decode_work, find_extend_work
from services.worker.native.extend import TILE_ROWS


def test_work_splits_a_segment_at_fixed_positions() -> None:
    """Items start at multiples of 256 whatever the window, so a request's sums are grouped alike in any batch."""
    table = np.arange(50, dtype=np.int32)
    meta = ForwardMeta.build([Segment(3, 0, table), Segment(1, 599, table)], 16, "cpu")

    full, windowed = find_decode_work(meta, None), find_decode_work(meta, 400)

    assert full is not None
    assert windowed is not None
    assert full.segments.tolist() == [[3, 0, 0, 3]]
    assert full.items.tolist() == [[0, 0, 256], [0, 256, 512], [0, 512, 600]]
    assert windowed.items.tolist() == [[0, 200, 256], [0, 256, 512], [0, 512, 600]]
    assert find_decode_work(ForwardMeta.build([Segment(2, 0, table)], 16, "cpu"), None) is None


def test_only_segments_of_several_rows_are_work() -> None:
    """A decode token is left to the other kernel; a step of decode tokens has no work at all."""
    table = np.arange(50, dtype=np.int32)
    mixed = ForwardMeta.build([Segment(3, 30, table), Segment(1, 599, table)], 16, "cpu")

    work = find_extend_work(mixed, 20, 3, 2)

    assert work is not None
    assert work.tables.tolist() == [0, 1, 2]
    assert work.segments.tolist() == [[0, 33, 0]]
    assert work.bounds[0].tolist() == [[11, 31], [12, 32], [13, 33], [0, 0]]
    assert find_extend_work(ForwardMeta.build([Segment(1, 9, table)], 16, "cpu"), None, 3, 2) is None


@given(
    spans=st.lists(st.integers(1, 500), min_size=1, max_size=5),
    group=st.integers(1, 300),
    kv_heads=st.integers(1, 9),
)
def test_tiles_cover_every_row_once(spans: list[int], group: int, kv_heads: int) -> None:
    """Whatever the group, no tile is larger than the kernel's scratch memory holds."""
    ends = np.cumsum(spans)
    cut = [(number, int(end - rows), int(end)) for number, (end, rows) in enumerate(zip(ends, spans, strict=True))]
    bounds = np.zeros((1, int(ends[-1]), 2), dtype=np.int32)

    tiles = cut_tiles(cut, bounds, group, kv_heads)

    rows = [(segment, row) for segment, first, last in tiles.tolist() for row in range(first, last)]
    assert sorted(rows) == [(segment, row) for segment, first, last in cut for row in range(first, last)]
    assert (tiles[:, 2] - tiles[:, 1]).max() <= max(1, TILE_ROWS // group)
