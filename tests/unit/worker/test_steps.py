"""A step holds one token of each decoding request with room, and the chunks that can be computed."""

from __future__ import annotations

from services.worker.steps import Work, chunks, pages_of, split_lost
from shared.messages.base import pack_int32
from shared.messages.worker_plans import PageLoad
from tests.unit.worker.driven_executor import chunk
from tests.unit.worker.made_requests import decoding, make_request


def test_the_chunk_that_ends_the_tokens_samples() -> None:
    """Earlier chunks only fill pages."""
    request = make_request(tokens=10, computed=4)

    (first,), _ = chunks({"r": request}, [chunk(4, 8)])
    (last,), _ = chunks({"r": request}, [chunk(4, 10)])

    assert (first.samples, last.samples) == (False, True)


def test_chunks_that_would_stand_on_nothing_are_rejected() -> None:
    """Missing prefix, other attempt, unknown request, beyond the tokens or pages, empty, or a second one."""
    request = make_request(tokens=10, computed=4)
    bad = [
        chunk(5, 8),
        chunk(4, 8, attempt=2),
        chunk(4, 11),
        chunk(4, 4),
        chunk(-1, 4),
        chunk(0, 4, request_id="stranger"),
    ]

    for each in bad:
        assert chunks({"r": request}, [each]) == ([], [each.request_id])
    work, rejected = chunks({"r": request}, [chunk(4, 6), chunk(4, 8)])
    assert (len(work), rejected) == (1, ["r"])


def test_a_chunk_may_be_computed_again() -> None:
    """Recomputing what is there already writes the same values to the same slots."""
    request = make_request(tokens=10, computed=8)

    work, rejected = chunks({"r": request}, [chunk(0, 10)])

    assert (work[0].start, rejected) == (0, [])


def test_a_chunk_beyond_the_page_table_is_rejected() -> None:
    """Attention must never read or write pages that are not the request's."""
    request = make_request(tokens=10, pages=(5, 6), computed=0)

    assert chunks({"r": request}, [chunk(0, 10)]) == ([], ["r"])


def page_load_of(request_id: str, *pages: int) -> PageLoad:
    packed = pack_int32(pages)
    return PageLoad(
        request_id=request_id, attempt=1, storage_id="s", host_pages=packed, device_pages=packed, identities=b""
    )


def prefill(request_id: str, start: int, end: int, pages: tuple[int, ...]) -> Work:
    request = make_request(pages=pages, computed=start)
    request.request_id = request_id
    return Work(request, start, end, samples=False, is_chunk=True)


def test_chunks_on_lost_pages_are_split_off() -> None:
    """Those whose prefix has a lost page; a page that a chunk itself writes is no loss, and decode steps go on."""
    good, bad = prefill("a", 4, 8, (5, 6, 7)), prefill("b", 8, 10, (5, 6, 7))
    decode = Work(decoding(), 9, 10, samples=True, is_chunk=False)

    assert split_lost([good, bad, decode], [], [], {6}) == ([good, decode], [bad], frozenset({6, 7}))


def test_a_loss_spreads_to_all_that_stand_on_it() -> None:
    """A failed request takes its load along, that load the requests that share it, and these what they were to
    write.
    """
    owner, sharer = prefill("a", 4, 8, (1, 2, 3)), prefill("b", 8, 10, (1, 9, 10))
    third, other = prefill("c", 4, 6, (10, 11)), prefill("d", 4, 6, (20, 21))
    loads = [page_load_of("a", 1), page_load_of("b", 9), page_load_of("d", 20)]

    good, lost, gone = split_lost([third, other, sharer], loads, [owner.request.request_id], [])

    assert good == [other]
    assert lost == [sharer, third]
    assert gone == {1, 9, 10, 11}


def test_pages_of_a_chunk_include_its_partial_pages() -> None:
    """Tokens 3 to 8 lie in the first three pages of four."""
    assert pages_of(Work(make_request(), 3, 9, samples=False, is_chunk=True)) == {5, 6, 7}
