"""A step holds one token of each decoding request with room, and the chunks that can be computed."""

from __future__ import annotations

from services.worker.steps import Work, chunks, decodes, pages_of, split_lost
from shared.messages.base import pack_int32
from shared.messages.worker_plans import PageLoad, PrefillChunk
from tests.unit.worker.made_requests import decoding, make_request


def chunk(start: int, end: int, *, request_id: str = "r", attempt: int = 1) -> PrefillChunk:
    return PrefillChunk(request_id=request_id, attempt=attempt, start=start, end=end)


def test_a_decoding_request_gives_the_row_of_its_last_token() -> None:
    """The token that was sampled last is the next to be computed."""
    request = decoding(tokens=10)
    request.tokens.append(77)
    request.computed = 10

    (work,) = decodes([request])

    assert (work.start, work.end, work.samples, work.is_chunk) == (10, 11, True, False)


def test_a_request_without_room_sits_the_step_out() -> None:
    """Its pages are full; it goes on when more come."""
    request = decoding(tokens=16)
    request.tokens.append(77)
    request.computed = 16

    assert decodes([request]) == []


def test_waiting_requests_are_not_decoded() -> None:
    """Only the chunks of a batch compute a prompt."""
    assert decodes([make_request()]) == []


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
