"""The plan of a step: every row reads exactly the keys that it may see, from where they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.attention_plan import BLOCK_ROWS, plan_attention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from shared.errors import InvariantViolated

WINDOWS = st.sampled_from([None, 1, 3, 24, 300, 5000])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """One to four segments over disjoint, shuffled or consecutive pages, and their page size."""
    page_size = draw(st.sampled_from([1, 4, 16, 64]))
    shapes = draw(
        st.lists(
            st.tuples(st.integers(1, 2 * BLOCK_ROWS + 3), st.sampled_from([0, 1, 31, 64, 400])), min_size=1, max_size=4
        )
    )
    counts = [-(-(rows + context) // page_size) + draw(st.integers(0, 2)) for rows, context in shapes]
    numbers = np.arange(sum(counts), dtype=np.int32)
    if draw(st.booleans()):
        numbers = np.random.default_rng(0).permutation(numbers)
    tables = np.split(numbers, np.cumsum(counts)[:-1])
    segments = [Segment(rows, context, table) for (rows, context), table in zip(shapes, tables, strict=True)]
    return segments, page_size


@given(step=steps(), window=WINDOWS, whole_prompts=st.booleans())
def test_every_row_reads_the_keys_it_may_see(
    step: tuple[list[Segment], int], window: int | None, whole_prompts: bool
) -> None:
    """Blocks cover all rows once; a block's keys are those its rows may see; sources hold the right slots."""
    segments, page_size = step
    meta = ForwardMeta.build(segments, page_size, "cpu")
    plan = plan_attention(meta, window, whole_prompts=whole_prompts)
    gathered = (plan.gather_pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    written = meta.slots.numpy()

    next_row = 0
    for segment, part in zip(segments, plan.segments, strict=True):
        slot_of = (segment.pages[:, None].astype(np.int64) * page_size + np.arange(page_size)).reshape(-1)
        positions = np.arange(segment.length - part.keys, segment.length)
        source = {"pool": np.arange(written.max() + slot_of.max() + 2), "gather": gathered, "batch": written}[
            part.source
        ]
        assert (source[part.first : part.first + part.keys] == slot_of[positions]).all()
        first_row = next_row
        for block in part.blocks:
            assert block.row_start == next_row
            next_row = block.row_end
            keys = positions[block.key_start : block.key_end]
            own = segment.context + np.arange(block.row_start, block.row_end) - first_row
            may_see = (keys[None] <= own[:, None]) & (keys[None] > own[:, None] - (window or 10**9))
            lowest = 0 if window is None else max(0, own[0] - window + 1)
            assert (keys[0], keys[-1]) == (lowest, own[-1])
            if block.mask == "none":
                assert may_see.all()
            elif block.mask == "triangle":
                assert (may_see == np.tri(len(own), len(keys), dtype=bool)).all()
            else:
                assert keys[block.diagonal] == own[0]
                assert len(own) <= BLOCK_ROWS
        assert next_row == first_row + segment.rows


def test_slots_are_page_and_offset() -> None:
    """New tokens go to page * page_size + offset; consecutive slots are recognised."""
    table = np.array([5, 6, 2], dtype=np.int32)

    meta = ForwardMeta.build([Segment(5, 6, table), Segment(1, 3, np.array([9], dtype=np.int32))], 4, "cpu")
    run = ForwardMeta.build([Segment(5, 2, table)], 4, "cpu")

    assert meta.slots.tolist() == [26, 27, 8, 9, 10, 39]
    assert meta.first_slot == -1
    assert run.slots.tolist() == [22, 23, 24, 25, 26]
    assert run.first_slot == 22


@pytest.mark.parametrize(("rows", "context", "pages"), [(0, 0, 1), (1, 4, 1), (5, 0, 1), (1, -1, 1)])
def test_impossible_segments_are_refused(rows: int, context: int, pages: int) -> None:
    """An empty segment, or one that its page table does not hold, is a broken invariant, not a wrong answer."""
    with pytest.raises(InvariantViolated):
        ForwardMeta.build([Segment(rows, context, np.zeros(pages, dtype=np.int32))], 4, "cpu")
