"""Sets of layers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bench.planner.spans import layer_mask, lowest, ranges


@given(st.integers(0, 2**80 - 1))
def test_ranges_are_the_set(layers: int) -> None:
    """Disjoint, rising, not touching, and together the set."""
    found = list(ranges(layers))
    union = 0
    for start, end in found:
        assert start < end
        union |= layer_mask(start, end)

    assert union == layers
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(found))


@given(st.integers(0, 2**80 - 1), st.integers(0, 90))
def test_the_lowest_layers_are_a_part_below_the_rest(layers: int, count: int) -> None:
    """As many as asked for, none above one that is left."""
    found = lowest(layers, count)

    assert found & ~layers == 0
    assert found.bit_count() == min(count, layers.bit_count())
    assert found.bit_length() <= ((layers & ~found) & -(layers & ~found)).bit_length() or layers == found
