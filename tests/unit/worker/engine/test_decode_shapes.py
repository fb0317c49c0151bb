"""Which sizes of a decode step have a graph, and which one serves a step."""

from __future__ import annotations

import pytest

from services.worker.engine.decode_shapes import LENGTHS, DecodeShape, decode_shapes, row_counts, smallest
from services.worker.engine.key_splits import splits_for


def test_rows_grow_by_less_and_less_of_what_they_are() -> None:
    """From 8 rows on no step computes half as many rows again as it has; the most is one of the sizes."""
    assert row_counts(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert row_counts(200) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 200]
    assert row_counts(1) == [1]
    assert row_counts(5) == [1, 2, 4, 5]


@pytest.mark.parametrize("most_rows", [1, 7, 64, 512])
def test_the_number_of_graphs_is_bounded(most_rows: int) -> None:
    """However many rows: a few sizes, each with at most four lengths, the largest first."""
    shapes = decode_shapes(most_rows, 131_072)

    assert len(shapes) == len(set(shapes)) <= 4 * 28
    assert shapes[0] == DecodeShape(most_rows, 131_072)
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)


def test_lengths_are_those_of_the_kernels_grid() -> None:
    """Each but the last is as long as its number of splits serves, and the next length has more of them."""
    assert [splits_for(length) for length in LENGTHS] == [1, 4, 16]
    assert [splits_for(length + 1) for length in LENGTHS] == [2, 5, 17]


def test_a_short_context_has_no_lengths_that_it_cannot_reach() -> None:
    """The last length is that of the context."""
    assert [shape.length for shape in decode_shapes(1, 2048)] == [2048, 512]
    assert [shape.length for shape in decode_shapes(1, 100)] == [100]


def test_the_smallest_that_serves_is_taken() -> None:
    """Rows count first, because each costs a row of every matrix product."""
    shapes = decode_shapes(32, 10_000)

    assert smallest(shapes, 1, 1) == DecodeShape(1, 512)
    assert smallest(shapes, 9, 513) == DecodeShape(16, 2048)
    assert smallest(shapes, 32, 10_000) == DecodeShape(32, 10_000)
    assert smallest(shapes, 33, 1) is None
    assert smallest(shapes, 1, 10_001) is None


def test_one_that_is_missing_is_replaced_by_the_next() -> None:
    """Where memory did not suffice for all, a larger one serves."""
    shapes = [shape for shape in decode_shapes(8, 1000) if shape != DecodeShape(2, 512)]

    assert smallest(shapes, 2, 100) == DecodeShape(2, 1000)
