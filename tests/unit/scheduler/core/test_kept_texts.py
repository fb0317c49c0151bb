"""What the scheduler knows of the texts that a worker keeps, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import pytest
from msgspec import structs

from services.scheduler.core.kept_texts import (
    KeptTexts,
    Reference,
    all_digests,
    check_texts,
    forget_texts,
    note_behind,
    refer,
)
from services.scheduler.core.queue import admission
from shared.codec import encode
from shared.messages.base import Message, pack_int32, unpack_int32
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.worker_events import TextMissing
from shared.messages.worker_plans import AdmitRequest, TextBase, WorkerPlan
from tests.scripted_cell import ScriptedCell, submit, worker_joined
from tests.small_blocks import small_blocks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell

TURN_BYTES = 6_000
"""What a turn may say beside 4 bytes for each new token: of 10 KB for all of it, what is not the request's."""


@pytest.fixture
def blocks_of_four() -> Iterator[None]:
    with small_blocks(4):
        yield


def digests(*names: str) -> bytes:
    """Of blocks of which each name stands for all before it."""
    return b"".join(blake2b(name.encode(), digest_size=16).digest() for name in names)


def kept(most_tokens: int = 100) -> KeptTexts:
    return KeptTexts(most_tokens=most_tokens)


def told(texts: KeptTexts, names: str, tokens: int, pages: list[int]) -> Reference:
    """Admit a prompt whose blocks are the prefixes of ``names``."""
    said = refer(texts, digests(*(names[:end] for end in range(1, len(names) + 1))), tokens, pack_int32(pages))
    check_texts("w", texts)
    return said


@pytest.mark.usefixtures("blocks_of_four")
def test_a_prompt_that_goes_on_takes_the_place_of_the_one_before() -> None:
    """It is said with a reference to that one, which is dropped by the same order."""
    texts = kept()

    assert told(texts, "ab", 9, [1, 2, 3]) == Reference(text=1)
    assert told(texts, "abcd", 18, [1, 2, 7]) == Reference(TextBase(text=1, tokens=8, pages=2), 2, (1,))
    assert (list(texts.texts), texts.tokens) == ([2], 18)


@pytest.mark.usefixtures("blocks_of_four")
def test_prompts_that_part_are_both_kept() -> None:
    """The later one refers to what both have; each is then found by what it alone has."""
    texts = kept()
    told(texts, "abc", 12, [1, 2, 3])

    assert told(texts, "abx", 12, [1, 2, 9]) == Reference(TextBase(text=1, tokens=8, pages=2), 2)
    assert told(texts, "abcd", 16, [1, 2, 3, 4]) == Reference(TextBase(text=1, tokens=12, pages=3), 3, (1,))
    assert told(texts, "abxy", 16, [1, 2, 9, 5]) == Reference(TextBase(text=2, tokens=12, pages=3), 4, (2,))


@pytest.mark.usefixtures("blocks_of_four")
def test_what_was_kept_first_goes_when_there_is_too_much() -> None:
    """Together they never have more tokens than the worker said; one that is larger is not kept at all."""
    texts = kept(30)
    told(texts, "a", 10, [1])
    told(texts, "b", 10, [2])

    assert told(texts, "c", 12, [3]) == Reference(text=3, dropped=(1,))
    assert told(texts, "bcdefghi", 36, [2, 8]) == Reference(TextBase(text=2, tokens=4, pages=1))
    assert told(texts, "a", 10, [1]) == Reference(text=4, dropped=(2,))


@pytest.mark.usefixtures("blocks_of_four")
def test_what_two_texts_have_is_found_when_one_has_gone() -> None:
    """The one kept last is referred to, and dropping the other does not hide it."""
    texts = kept(30)
    told(texts, "ab", 10, [1, 2])
    told(texts, "ax", 10, [1, 3])

    assert told(texts, "c", 12, [4]) == Reference(text=3, dropped=(1,))
    assert told(texts, "az", 8, [1, 5]) == Reference(TextBase(text=2, tokens=4, pages=1), 4)


@pytest.mark.usefixtures("blocks_of_four")
def test_pages_are_compared_up_to_the_first_that_differs() -> None:
    """Other numbers behind it may be the same again, which helps nobody."""
    texts = kept()
    told(texts, "a", 9, [1, 2, 3, 4, 5])

    for pages, same in (([1, 2, 3, 4, 5, 6], 5), ([9, 2, 3, 4, 5], 0), ([1, 2, 9, 4, 5], 2), ([1], 1), ([], 0)):
        base = told(texts, "a", 9, pages).base
        assert base is not None
        assert base.pages == same
        told(texts, "a", 9, [1, 2, 3, 4, 5])


@pytest.mark.usefixtures("blocks_of_four")
def test_what_is_forgotten_is_dropped_with_the_next_order_that_may_say_so() -> None:
    """No text is referred to any more, and the worker's memory is freed."""
    texts = kept()
    told(texts, "a", 9, [1])
    told(texts, "b", 9, [1])
    forget_texts(texts)

    assert refer(texts, b"", 3, b"") == Reference()
    assert told(texts, "ab", 9, [1]) == Reference(text=3, dropped=(1, 2))
    assert told(texts, "abc", 12, [1]) == Reference(TextBase(text=3, tokens=8, pages=1), 4, (3,))


@pytest.mark.usefixtures("blocks_of_four")
def test_a_prompt_that_came_by_reference_is_found_by_the_digests_that_it_came_with() -> None:
    """Those of the blocks before come from the text that is found; where none is, nobody knows them."""
    texts = kept()
    told(texts, "abc", 13, [1])
    names = digests("a", "ab", "abc", "abcd")

    assert all_digests(texts, names, 0) == names
    assert all_digests(texts, digests("abc", "abcd"), 2) == names
    assert all_digests(texts, digests("abcd"), 3) == b""


@pytest.mark.usefixtures("blocks_of_four")
def test_a_prompt_that_goes_on_behind_an_answer_is_known_by_what_that_made_whole() -> None:
    """Every digest before its base is known, as long as the text is; the worker does not keep the answer's blocks."""
    texts = kept()
    told(texts, "ab", 9, [1])
    note_behind(texts, digests("ab"), digests("abc", "abcd"))
    check_texts("w", texts)

    assert all_digests(texts, digests("abc"), 2) == digests("a", "ab", "abc")
    assert all_digests(texts, digests("abcd", "abcde"), 3) == digests("a", "ab", "abc", "abcd", "abcde")
    assert told(texts, "abcde", 20, [1]) == Reference(TextBase(text=1, tokens=8, pages=1), 2, (1,))
    assert all_digests(texts, digests("abcd"), 3) == digests("a", "ab", "abc", "abcd")
    forget_texts(texts)
    assert all_digests(texts, digests("abcd"), 3) == b""
    check_texts("w", texts)


@pytest.mark.usefixtures("blocks_of_four")
def test_what_is_behind_goes_with_its_text() -> None:
    """Also where it was said of another one meanwhile, or the text is not kept any more."""
    texts = kept(30)
    told(texts, "a", 10, [1])
    note_behind(texts, digests("a"), digests("ab"))
    told(texts, "x", 10, [1])
    note_behind(texts, digests("x"), digests("xy"))
    note_behind(texts, digests("x"), digests("xz"))
    note_behind(texts, digests("q"), digests("qr"))
    told(texts, "y", 20, [1])
    check_texts("w", texts)

    assert list(texts.behind) == [digests("xz")]
    assert all_digests(texts, digests("ab"), 1) == b""


def small_cell(make_cell: MakeCell, kept_tokens: int = 1 << 20) -> CellModel:
    cell = make_cell(page_size=16, workers=0)
    cell.kept_tokens = kept_tokens
    cell.add_worker("worker-0", pages=1_000)
    return cell


def turn(cell: CellModel, tokens: list[int]) -> AdmitRequest:
    """Ask, and let it be answered."""
    cell.serve(tokens, max_tokens=2)
    return cell.admitted[-1]


def test_a_turn_says_what_is_new_in_it() -> None:
    """Of 130,000 tokens in pages of 16, 100 new ones are told in less than 6 KB and 4 bytes each."""
    cell = ScriptedCell()
    cell.put(CellConfigured(config=CellConfig()))
    cell.put(structs.replace(worker_joined(pages=12_000), max_context=1 << 18, kept_tokens=1 << 20))
    prompt = list(range(130_000))
    plans = []
    for number in range(4):
        cell.put(submit(f"r{number}", prompt + list(range(number * 100)), max_tokens=8))
        said = [plan for published in cell.outputs for plan in published if isinstance(plan, WorkerPlan)]
        plans.append([plan for plan in said if isinstance(plan.order, AdmitRequest)][-1])

    first, *turns = plans
    assert len(encode(first)) > 130_000 * 4
    for plan in turns:
        order = plan.order
        assert isinstance(order, AdmitRequest)
        assert order.base is not None
        assert order.token_count == order.prompt_tokens
        assert order.cached_tokens >= order.prompt_tokens - 116
        assert len(encode(plan)) <= TURN_BYTES + 4 * 100


SESSION_BYTES = 10_240
"""What a turn of a session may put on both streams beside so many bytes for each new token."""


@pytest.mark.parametrize(("disk_chunks", "token_bytes"), [(0, 4), (4_000, 6)])
def test_a_turn_of_a_session_takes_few_bytes_of_both_streams(
    make_cell: MakeCell, disk_chunks: int, token_bytes: int
) -> None:
    """3,500 new tokens a turn, of a vocabulary of 150,000; a disk is told them once more, to save them."""
    cell = make_cell(page_size=16, workers=0, lease_tokens=64)
    cell.kept_tokens, cell.takes_compact = 1 << 20, True
    cell.add_worker("worker-0", pages=4_000)
    cell.add_storage("storage-0", pages=100, disk_chunks=disk_chunks)
    cell.drain()
    tokens: list[int] = []
    for number in range(3):
        tokens += [(number * 3_436 + place) * 7919 % 150_000 for place in range(3_436)]
        inputs, outputs = len(cell.log), len(cell.outputs)
        base = len(tokens[:-3_436]) // 1_024 * 1_024
        asked = cell.serve(list(tokens), max_tokens=64, ignore_eos=True, base_tokens=base)
        tokens += cell.gateway("gateway").tokens[asked]

        said = [output for step in cell.outputs[outputs:] for output in step if isinstance(output, Message)]
        nbytes = sum(len(encode(stamped.input)) for stamped in cell.log[inputs:]) + sum(map(len, map(encode, said)))
        assert nbytes <= SESSION_BYTES + token_bytes * 3_500
    assert cell.state.counters["bases_resolved"] == 2
    assert cell.state.counters.get("saved_chunks", 0) == (len(tokens) // 64 if disk_chunks else 0)


def test_an_earlier_worker_is_told_everything(make_cell: MakeCell) -> None:
    """One that does not say that it keeps texts never meets a field that it does not know."""
    cell = small_cell(make_cell, kept_tokens=0)
    turn(cell, list(range(3_000)))
    said = turn(cell, list(range(3_100)))

    assert (said.base, said.text, said.dropped) == (None, 0, ())
    assert unpack_int32(said.tokens) == list(range(3_100))


def test_a_prompt_by_reference_is_told_by_reference(make_cell: MakeCell) -> None:
    """Also where its base ends behind the answer to what the worker keeps, of which only the prompt is known there."""
    cell = small_cell(make_cell)
    asked = cell.serve(list(range(2_000)), max_tokens=60, ignore_eos=True)
    prompt = list(range(2_000)) + cell.gateway("gateway").tokens[asked]

    for more, base_tokens, shared in ((5, 2_048, 1_024), (9, 2_048, 2_048), (1_500, 2_048, 2_048)):
        cell.serve(prompt + [7] * more, max_tokens=2, base_tokens=base_tokens)
        base = cell.admitted[-1].base
        assert base is not None
        assert base.tokens == shared
    assert cell.state.counters["bases_resolved"] == 3


def test_a_long_prompt_is_not_hashed_again_behind_an_answer(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base ends in what the last answer made whole: no text has that block, and yet all digests are known."""
    cell = small_cell(make_cell)
    tokens, base = list(range(2_000)), 0
    for _ in range(3):
        asked = cell.serve(list(tokens), max_tokens=1_100, ignore_eos=True, base_tokens=base)
        tokens += cell.gateway("gateway").tokens[asked]
        base = (len(tokens) - 2) // 1_024 * 1_024
        monkeypatch.setattr(admission, "block_digests", None)  # It would be called with the whole prompt.

    assert cell.state.counters["bases_resolved"] == 2


def test_another_incarnation_is_told_everything(make_cell: MakeCell) -> None:
    """What the one before kept is gone with it."""
    cell = small_cell(make_cell)
    turn(cell, list(range(3_000)))
    cell.lose_worker("worker-0")
    cell.add_worker("worker-0", pages=1_000)

    said = turn(cell, list(range(3_100)))
    assert (said.base, said.text) == (None, 1)


def test_a_text_that_a_worker_lacks_costs_an_attempt_and_no_token(make_cell: MakeCell) -> None:
    """The request starts again with all that it has to say; no other text is relied upon until it was kept anew."""
    cell = small_cell(make_cell)
    turn(cell, list(range(3_000)))
    turn(cell, list(range(10_000, 13_000)))
    cell.workers["worker-0"].texts.__init__()  # type: ignore[misc]
    turn(cell, list(range(3_100)))

    refused, again = cell.admitted[-2:]
    assert (refused.attempt, again.attempt) == (1, 2)
    assert refused.base is not None
    assert (again.base, again.dropped) == (None, (2, 3))
    assert cell.state.counters["texts_missing"] == 1
    assert turn(cell, list(range(10_000, 13_100))).base is None


def test_a_word_of_a_text_from_another_attempt_or_incarnation_stops_nothing(make_cell: MakeCell) -> None:
    """The scheduler may hear it late, or twice."""
    cell = small_cell(make_cell)
    cell.submit(list(range(3_000)), max_tokens=2, request_id="r")
    incarnation = cell.workers["worker-0"].incarnation
    for who, attempt in (("gone", 1), (incarnation, 7)):
        cell.feed(TextMissing(worker_id="worker-0", incarnation=who, request_id="r", attempt=attempt, text=1))
    cell.drain()

    assert [order.attempt for order in cell.admitted] == [1]
