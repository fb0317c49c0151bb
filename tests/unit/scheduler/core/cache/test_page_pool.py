"""The page allocator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache import page_pool
from services.scheduler.core.cache.page_pool import new_pool
from shared.errors import InvariantViolated
from shared.messages.base import pack_int32, unpack_int32
from tests.present import present


def test_allocation_is_contiguous_where_a_run_is_long_enough() -> None:
    """A run that holds the whole request wins over lower, scattered pages."""
    pool = new_pool(10)
    first = pool.allocate(3)
    pool.allocate(1)
    assert first is not None
    pool.release(first)

    assert unpack_int32(present(pool.allocate(4))) == [4, 5, 6, 7]
    assert unpack_int32(present(pool.allocate(3))) == [0, 1, 2]


def test_allocation_scatters_when_no_run_is_long_enough() -> None:
    """Free pages are all usable, however they lie."""
    pool = new_pool(5)
    pool.allocate(5)
    pool.release(pack_int32([0, 2, 4]))

    assert unpack_int32(present(pool.allocate(3))) == [0, 2, 4]
    assert pool.free == 0


def test_a_pool_gives_all_or_nothing() -> None:
    """Asking for more than is free takes nothing."""
    pool = new_pool(3)

    assert pool.allocate(4) is None
    assert pool.allocate(0) == b""
    assert pool.free == 3


@pytest.mark.parametrize("pages", [[1], [7], [-1], [0, 0], [0, 1], [2, 0]])
def test_a_page_is_released_once(pages: list[int]) -> None:
    """A page that is free already, or is none of the pool's, is a fault of the core."""
    pool = new_pool(3)
    pool.allocate(1)

    with pytest.raises(InvariantViolated):
        pool.release(pack_int32(pages))


@pytest.mark.parametrize("pages", [[3], [7], [-1], [2, 3], [-1, 0], [0, 3], [0, -2]])
def test_a_page_outside_the_pool_is_refused(pages: list[int]) -> None:
    """Below 0, just behind the last and far behind it, in a run and scattered; nothing changes."""
    pool = new_pool(3)
    pool.allocate(3)

    with pytest.raises(InvariantViolated, match="are not all of a pool of 3"):
        pool.release(pack_int32(pages))

    assert (pool.free, pool.free_map) == (0, bytearray(3))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_a_pool_behaves_like_a_list_of_free_pages(actions: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back, no page is lost or given twice."""
    pool = new_pool(30)
    held: list[int] = []
    for is_taking, number in actions:
        if is_taking:
            pages = pool.allocate(number)
            assert (pages is None) == (number > 30 - len(held))
            held += unpack_int32(pages or b"")
            assert len(dict.fromkeys(held)) == len(held)
        else:
            returned, held = held[::2][:number], [page for page in held if page not in held[::2][:number]]
            pool.release(pack_int32(returned))

    free = [page for page, is_free in enumerate(pool.free_map) if is_free]
    assert sorted(free + held) == list(range(30))
    assert pool.free == len(free)


def test_a_pool_larger_than_one_search_gives_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search for a run ends before it finds one, scattered pages are taken across windows."""
    monkeypatch.setattr(page_pool, "_PAGES_SEARCHED", 8)
    monkeypatch.setattr(page_pool, "_WINDOW", 4)
    pool = new_pool(40)
    pool.allocate(40)
    pool.release(pack_int32([1, 5, 6, 9, 30, 31, 32, 33, 34]))

    assert unpack_int32(present(pool.allocate(5))) == [1, 5, 6, 9, 30]
    assert unpack_int32(present(pool.allocate(4))) == [31, 32, 33, 34]
    assert pool.free == 0


def test_pages_may_come_back_in_any_order() -> None:
    """A page list is given back as it stands in a page table: scattered, unsorted, or one run."""
    pool = new_pool(8)
    pool.allocate(8)

    pool.release(pack_int32([7, 0, 3]))
    pool.release(pack_int32([1, 2]))

    assert unpack_int32(present(pool.allocate(4))) == [0, 1, 2, 3]
    assert unpack_int32(present(pool.allocate(1))) == [7]
