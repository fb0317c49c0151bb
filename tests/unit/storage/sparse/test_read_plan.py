"""Which parts of a file are read for which rows: all that is needed, and of gaps only those that are worth it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.storage.backends import BLOCK_BYTES
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.read_check import Asked
from services.storage.sparse.read_plan import gap_worth_reading, plan_reads
from shared.messages.pools import KvGeometry

LAYOUTS = [
    SparseLayout.of(KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")),
    SparseLayout.of(KvGeometry(layers=2, kv_heads=4, head_dim=8, page_size=16, dtype="float16"), block_tokens=4),
    SparseLayout.of(KvGeometry(layers=2, kv_heads=1, head_dim=3, page_size=1, dtype="bfloat16")),
]


@given(
    layout=st.sampled_from(LAYOUTS),
    tokens=st.sets(st.integers(0, 127), min_size=1),
    gap_blocks=st.integers(0, 64),
    halves=st.sampled_from([(0, 1), (0,), (1,)]),
)
@settings(max_examples=80)
def test_ranges_are_whole_blocks_that_hold_the_rows(
    layout: SparseLayout, tokens: set[int], gap_blocks: int, halves: tuple[int, ...]
) -> None:
    """They ascend, lie further apart than the gap, and hold no longer run of blocks that nobody needs."""
    keys = tuple(layout.key("ab" * 16, bytes([place]) * 16) for place in range(2))
    chosen = np.array([sorted(tokens)], np.int32)
    asked = Asked(keys, 0, 1, halves, (), chosen, 0)
    inverse = np.arange(layout.tokens)[::-1]

    reads = plan_reads(asked, [inverse, inverse], layout, is_sealed=False, gap_bytes=gap_blocks * BLOCK_BYTES)

    for read in reads:
        needed = set()
        for token in tokens:
            if token // layout.tokens == read.place:
                row = int(inverse[token % layout.tokens])
                for half in halves:
                    unit = layout.probe_heads + half * layout.blocks + row // layout.block_tokens
                    start, nbytes = layout.unit_at(1, unit, is_sealed=False)
                    needed |= set(range(start // BLOCK_BYTES, -(-(start + nbytes) // BLOCK_BYTES)))
        read_blocks: list[int] = []
        for offset, nbytes in read.ranges:
            assert offset % BLOCK_BYTES == nbytes % BLOCK_BYTES == 0
            assert nbytes > 0
            first = offset // BLOCK_BYTES
            assert not read_blocks or first - read_blocks[-1] - 1 > gap_blocks
            read_blocks += range(first, first + nbytes // BLOCK_BYTES)
            assert {read_blocks[-1], first} <= needed
        assert needed <= set(read_blocks)
        edges = sorted(needed)
        unneeded = set(read_blocks) - needed
        gaps = [b - a - 1 for a, b in pairwise(edges) if b - a > 1 and a + 1 in unneeded]
        assert all(gap <= gap_blocks for gap in gaps)
        assert read.nbytes == len(read_blocks) * BLOCK_BYTES
    assert {read.place for read in reads} == {token // layout.tokens for token in tokens}


@pytest.mark.parametrize(
    ("bytes_per_s", "blocks"),
    [(100e6, 0), (0.0, 7), (2.5e9, 18), (10e9, 73)],
    ids=["slow", "not known", "NVMe", "several"],
)
def test_the_faster_a_disk_the_more_of_a_gap_is_read(bytes_per_s: float, blocks: int) -> None:
    """A slow disk, or one that is to be spared, is asked for what is needed alone."""
    assert gap_worth_reading(bytes_per_s) == blocks * BLOCK_BYTES
