"""Areas of a ring never overlap while they are in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.restore.ring_space import RingSpace
from shared.errors import InvariantViolated


@given(st.integers(1, 40), st.lists(st.integers(-1, 20), max_size=60))
def test_areas_in_use_are_disjoint(capacity: int, work: list[int]) -> None:
    """Whatever is taken (n > 0) and given back (else): areas lie inside, apart, and ``largest`` is what fits."""
    space = RingSpace(capacity)
    used: list[range] = []
    for nbytes in work:
        if nbytes > 0:
            largest = space.largest
            start = space.take(nbytes)

            assert (start is not None) == (nbytes <= largest)
            if start is not None:
                area = range(start, start + nbytes)
                assert 0 <= area.start < area.stop <= capacity
                assert all(area.stop <= other.start or other.stop <= area.start for other in used)
                used.append(area)
        elif used:
            space.give_back_oldest()
            used.pop(0)


def test_an_empty_ring_has_all_its_room_again() -> None:
    """Where the last area ended does not matter once nothing is in use."""
    space = RingSpace(10)
    for _ in range(5):
        assert space.take(7) is not None
        assert space.take(7) is None
        space.give_back_oldest()

    assert space.largest == 10
    with pytest.raises(InvariantViolated):
        space.give_back_oldest()
