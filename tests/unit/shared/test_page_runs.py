"""Page numbers as runs are the same numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import CodecError
from shared.messages.base import pack_int32, unpack_int32
from shared.page_runs import MOST_PAGES, pages_of, runs_of

STRETCHES = st.lists(st.tuples(st.integers(-2, 40), st.integers(1, 9), st.booleans()), max_size=12)


@given(STRETCHES)
def test_every_number_comes_back(stretches: list[tuple[int, int, bool]]) -> None:
    """Of runs, repetitions, single numbers, and of such as stand for no page."""
    pages = [first + (place if rises else 0) for first, count, rises in stretches for place in range(count)]

    runs = runs_of(pack_int32(pages))

    assert unpack_int32(pages_of(runs)) == pages


def test_a_run_takes_eight_bytes() -> None:
    """So does a run of no pages; a number that nothing follows is one of its own."""
    pages = [*range(100, 1_100), -1, -1, -1, 7, 5, 6]

    runs = runs_of(pack_int32(pages))

    assert unpack_int32(runs) == [100, 1_000, -1, 3, 7, 1, 5, 2]


@pytest.mark.parametrize("count", [511, 512, 513])
def test_few_and_many_pages_have_the_same_runs(count: int) -> None:
    """Lists up to 512 pages are read another way."""
    pages = [*range(9, 9 + count - 3), -1, -1, 4]

    assert unpack_int32(runs_of(pack_int32(pages))) == [9, count - 3, -1, 2, 4, 1]
    assert unpack_int32(pages_of(runs_of(pack_int32(pages)))) == pages


def test_the_greatest_number_is_no_run_with_the_least() -> None:
    """Numbers of 32 bits do not go round."""
    pages = [2**31 - 1, -(2**31), -(2**31) + 1]

    assert unpack_int32(pages_of(runs_of(pack_int32(pages)))) == pages


@pytest.mark.parametrize(
    "runs",
    [b"\0" * 7, pack_int32([1, 0]), pack_int32([1, -1]), pack_int32([0, MOST_PAGES, 0, 1]), pack_int32([0, 2**31 - 1])],
)
def test_nonsense_is_refused(runs: bytes) -> None:
    """No memory is taken for more pages than a list may have."""
    with pytest.raises(CodecError):
        pages_of(runs)
