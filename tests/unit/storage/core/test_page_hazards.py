"""Writers of host pages wait for the reads that were ordered before them, and for no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.storage.core.page_hazards import PageHazards


def test_a_write_comes_after_the_earlier_reads_of_its_pages() -> None:
    """Reads of other pages, and reads ordered later, are none of its business."""
    hazards = PageHazards()
    mine, other = hazards.begin([1, 2]), hazards.begin([3])
    before = hazards.before([2, 9])
    later = hazards.begin([2])

    assert before == (mine,)
    assert not hazards.is_clear(before)
    assert hazards.finish(mine)
    assert hazards.is_clear(before)
    assert hazards.before([2, 3]) == (later, other)


def test_a_read_is_over_once() -> None:
    """Finishing twice, or what never began, changes nothing."""
    hazards = PageHazards()
    ticket = hazards.begin([5])

    assert hazards.finish(ticket)
    assert not hazards.finish(ticket)
    assert not hazards.finish(77)
    assert len(hazards) == 0


def test_without_reads_nothing_waits() -> None:
    """A write of pages that nobody reads is clear at once, as is one of no pages."""
    hazards = PageHazards()

    assert hazards.before([1, 2, 3]) == ()
    assert hazards.is_clear(())


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.booleans()), max_size=30))
def test_it_agrees_with_a_list_of_reads(steps: list[tuple[list[int], bool]]) -> None:
    """Whatever the order of begins and ends, a write waits for exactly the open reads that share a page with it."""
    hazards, reads = PageHazards(), {}
    for pages, is_read in steps:
        if is_read:
            reads[hazards.begin(pages)] = set(pages)
        elif reads:
            ticket = min(reads)
            hazards.finish(ticket)
            del reads[ticket]

        assert set(hazards.before(pages)) == {ticket for ticket, read in reads.items() if read & set(pages)}
        assert len(hazards) == len(reads)
