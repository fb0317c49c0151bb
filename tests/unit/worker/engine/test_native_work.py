"""What of a step goes to the compiled attention kernels."""

from __future__ import annotations

import itertools
from operator import itemgetter

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.native_work import cut_tiles, find_decode_work, find_extend_work
from services.worker.native.extend import SPAN_KEYS, TILE_ROWS
from tests.unit.worker.torch_threads import torch_threads


def test_work_splits_a_segment_at_fixed_positions() -> None:
    """Items start at multiples of 256 whatever the window, so a request's sums are grouped alike in any batch."""
    table = np.arange(50, dtype=np.int32)
    meta = ForwardMeta.build([Segment(3, 0, table), Segment(1, 599, table)], 16, "cpu")

    full, windowed = find_decode_work(meta, None), find_decode_work(meta, 400)

    assert full is not None
    assert windowed is not None
    assert full.segments.tolist() == [[3, 0, 0, 3]]
    assert full.items.tolist() == [[0, 0, 256, 0], [0, 256, 512, 1], [0, 512, 600, 2]]
    assert windowed.items.tolist() == [[0, 200, 256, 0], [0, 256, 512, 1], [0, 512, 600, 2]]
    assert find_decode_work(ForwardMeta.build([Segment(2, 0, table)], 16, "cpu"), None) is None


def test_rows_of_one_request_take_the_same_keys_one_after_the_other() -> None:
    """Neighbouring rows with one table have it once, and their items are ordered by keys; partials stay in the order of
    rows, in which they are merged.
    """
    mine, theirs = np.arange(50, dtype=np.int32), np.arange(50, 100, dtype=np.int32)
    segments = [Segment(1, 9, theirs), Segment(1, 300, mine), Segment(1, 301, mine), Segment(1, 9, theirs)]

    work = find_decode_work(ForwardMeta.build(segments, 16, "cpu"), None)

    assert work is not None
    assert work.tables.tolist() == [*theirs, *mine, *theirs]
    assert work.segments.tolist() == [[0, 0, 0, 1], [1, 50, 1, 3], [2, 50, 3, 5], [3, 100, 5, 6]]
    assert work.items.tolist() == [
        [0, 0, 10, 0],
        *([1, 0, 256, 1], [2, 0, 256, 3], [1, 256, 301, 2], [2, 256, 302, 4]),
        [3, 0, 10, 5],
    ]


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
    shapes=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 40_000)), min_size=1, max_size=5),
    window=st.sampled_from([None, 100, 9_000]),
    group=st.integers(1, 300),
    kv_heads=st.integers(1, 9),
    threads=st.sampled_from([1, 2, 16]),
)
def test_tiles_cover_every_row_and_key_once(
    shapes: list[tuple[int, int]], window: int | None, group: int, kv_heads: int, threads: int
) -> None:
    """Whatever the group, no tile is larger than the kernel's scratch memory holds, and its units hold its spans."""
    bounds, ranges = _bounds(shapes, window)

    with torch_threads(threads):
        tiling = cut_tiles(ranges, bounds, group, kv_heads)

    rows = [(segment, row) for segment, first, last, *_ in tiling.tiles.tolist() for row in range(first, last)]
    assert sorted(rows) == [(segment, row) for segment, first, last in ranges for row in range(first, last)]
    assert (tiling.tiles[:, 2] - tiling.tiles[:, 1]).max() <= max(1, TILE_ROWS // group)
    units_of = {
        number: list(units) for number, units in itertools.groupby(sorted(tiling.units.tolist()), itemgetter(0))
    }
    for number, (_, first, last, first_span, first_part, last_part) in enumerate(tiling.tiles.tolist()):
        seen = range(bounds[0, first, 0] // SPAN_KEYS, -(-bounds[0, last - 1, 1] // SPAN_KEYS))
        units = units_of[number]
        if first_part == last_part:
            assert units == [[number, seen.start, seen.stop, -1]]
        else:
            assert units == [[number, span, span + 1, first_part + span - seen.start] for span in seen]
            assert (first_span, last_part - first_part) == (seen.start, len(seen))
    left = sorted(unit[3] for unit in tiling.units.tolist() if unit[3] >= 0)
    assert left == list(range(tiling.parts))


def test_few_rows_that_see_many_keys_are_work_for_all_threads() -> None:
    """A question about a long document is cut along the document; a chunk of a prompt is not, having rows enough."""
    with torch_threads(2):
        question, chunk = (
            cut_tiles(ranges, bounds, 2, 1)
            for bounds, ranges in (_bounds([(53, 130_480)], None), _bounds([(2_048, 130_480)], None))
        )

    assert (len(question.tiles), len(question.units), question.parts) == (1, 32, 32)
    assert (len(chunk.tiles), len(chunk.units), chunk.parts) == (22, 22, 0)


def _bounds(
    shapes: list[tuple[int, int]], window: int | None
) -> tuple[npt.NDArray[np.int32], list[tuple[int, int, int]]]:
    """Of segments of (rows, context): what each row sees, and the rows of each."""
    ends = np.cumsum([rows for rows, _ in shapes])
    bounds = np.zeros((1, int(ends[-1]), 2), dtype=np.int32)
    ranges = []
    for number, ((rows, context), end) in enumerate(zip(shapes, ends.tolist(), strict=True)):
        bounds[0, end - rows : end, 1] = np.arange(context + 1, context + rows + 1)
        ranges.append((number, end - rows, end))
    if window is not None:
        bounds[0, :, 0] = np.maximum(0, bounds[0, :, 1] - window)
    return bounds, ranges
