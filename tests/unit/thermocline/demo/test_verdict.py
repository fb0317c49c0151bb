"""What the demo calls wrong: what the system promises at every size, and no more."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from thermocline.client import Answer
from thermocline.demo.report import Pass
from thermocline.demo.verdict import Seen, faults, must_load, notes, wanted_chunks
from thermocline.demo.workload import Ask, Workload

DEVICE_TOKENS = 2000


def work_of(documents: int = 6, questions: int = 4, tokens: int = 768, turns: int = 3) -> Workload:
    """Questions go through all documents, again and again."""
    asks = [Ask(document, "?", "!", []) for _ in range(questions) for document in range(documents)]
    return Workload(asks, "", [("?", "!")] * turns, documents * tokens)


def pass_of(count: int, **tokens: Any) -> Pass:
    """One in which every answer is right, and every prefix was found in these places."""
    answers = [
        Answer(token_ids=[1, 2, 3], prompt_tokens=800, cached_tokens=sum(tokens.values()), **tokens)
        for _ in range(count)
    ]
    return Pass("a pass", answers, [True] * count)


def seen_of(work: Workload, **changes: Any) -> Seen:
    """A cell in which all went well, but for ``changes``."""
    documents, size = len({ask.document for ask in work.asks}), len(work.asks) + len(work.talk)
    good = Seen(
        cached=pass_of(size, device_tokens=64, host_tokens=64),
        plain=pass_of(size),
        again=pass_of(documents, disk_tokens=64),
        firsts=list(range(documents)),
        device_tokens=DEVICE_TOKENS,
        saved_chunks=1000,
        concurrency=2,
        is_bundled=True,
    )
    return replace(good, **changes)


def test_nothing_is_wrong_at_any_size_when_all_was_found_and_is_the_same() -> None:
    """Then there are neither faults nor notes."""
    shapes = itertools.product((1, 2, 5, 6, 16, 200), (1, 2, 6), (1, 64, 333, 1024, 4000), (0, 1, 8))
    for shape in shapes:
        work = work_of(*shape)

        assert faults(work, seen_of(work)) == [], shape
        assert notes(seen_of(work)) == [], shape


@pytest.mark.parametrize("name", ["cached", "again"])
def test_one_differing_token_is_wrong(name: str) -> None:
    """It is told how many answers differ."""
    work = work_of()
    seen = seen_of(work)
    getattr(seen, name).answers[1].token_ids = [1, 5, 3]

    (fault,) = faults(work, seen)

    assert fault.startswith("1 answers differ")


@pytest.mark.parametrize(("margin", "is_fault"), [(2e-5, False), (0.2, True)])
def test_a_token_that_rounding_decides_is_a_note(margin: float, *, is_fault: bool) -> None:
    """The two likeliest tokens at the place where answers part are equal but for rounding, or they are not."""
    work = work_of()
    seen = seen_of(work)
    seen.cached.answers[1].token_ids = [1, 5, 3]
    seen.plain.answers[1].margins = [3.0, margin, 3.0]

    assert bool(faults(work, seen)) is is_fault
    assert bool(notes(seen)) is not is_fault


def test_an_answer_that_ends_early_differs() -> None:
    """Its tokens are the first of the other's, and the end was not near."""
    work = work_of()
    seen = seen_of(work)
    seen.cached.answers[0].token_ids = [1, 2]
    seen.plain.answers[0].margins = [3.0, 3.0, 3.0]

    assert len(faults(work, seen)) == 1


@pytest.mark.parametrize(
    ("asked", "wrong", "is_fault"), [(2, 1, False), (2, 2, False), (20, 6, False), (104, 16, False), (104, 52, True)]
)
def test_wrong_answers_are_a_fault_where_chance_does_not_explain_them(
    asked: int, wrong: int, *, is_fault: bool
) -> None:
    """A model that is right nine times of ten may fail the only two questions, and not half of a hundred."""
    work = work_of(documents=asked, questions=1, turns=0)
    seen = seen_of(work)
    seen.cached.right[:wrong] = [False] * wrong

    assert bool(faults(work, seen)) is is_fault


@pytest.mark.parametrize(("tokens", "is_bundled"), [(2048, True), (768, False)])
def test_accuracy_is_asked_for_only_where_it_is_known(tokens: int, *, is_bundled: bool) -> None:
    """Not over documents longer than those it was measured on, and not of a model of the reader's."""
    work = work_of(tokens=tokens)
    size = len(work.asks) + len(work.talk)
    poor = replace(pass_of(size), right=[False] * size)

    assert faults(work, seen_of(work, plain=poor, is_bundled=is_bundled)) == []


def test_a_cache_that_was_not_to_be_read_is_told() -> None:
    """Whatever the size."""
    work = work_of(documents=1, questions=1, tokens=64, turns=1)

    assert faults(work, seen_of(work, plain=pass_of(2, device_tokens=16))) == [
        "the pass without caching reports cached tokens"
    ]


def test_one_document_that_is_not_on_the_disk_is_told() -> None:
    """All of them were saved before the cell ended; of some that were not, which is a note, any is enough."""
    work = work_of()
    again = pass_of(6, disk_tokens=64)
    again.answers[4].disk_tokens = 0
    cached = pass_of(27, device_tokens=64, host_tokens=64)
    cached.answers[0].prompt_token_ids = list(range(800))

    whole = seen_of(work, again=again, cached=cached, saved_chunks=12)
    part = seen_of(work, again=again, cached=cached, saved_chunks=11)

    assert faults(work, whole) == ["1 of 6 documents were not found on the disk after the restart"]
    assert notes(whole) == []
    assert faults(work, part) == []
    assert notes(part)[0].startswith("11 of 12 chunks had been saved")


def test_a_disk_that_gives_nothing_is_told() -> None:
    """However little was saved, unless no prompt fills a chunk."""
    work = work_of()
    short = pass_of(6)
    for answer in short.answers:
        answer.prompt_tokens = 64

    assert faults(work, seen_of(work, again=pass_of(6), saved_chunks=0)) != []
    assert faults(work, seen_of(work, again=short)) == []


@pytest.mark.parametrize(
    ("shape", "concurrency", "is_so"),
    [
        ({}, 2, True),
        ({"documents": 5}, 2, False),  # Half of them fit on the device.
        ({"questions": 1}, 2, False),  # None of them comes back.
        ({"tokens": 128}, 2, False),  # They may rightly be computed again.
        ({"tokens": 255, "documents": 100}, 2, False),
        ({}, 23, False),  # The scheduler may serve the questions on one document one after another.
        ({"documents": 60, "tokens": 1024}, 16, True),
    ],
)
def test_a_load_is_asked_for_only_where_no_order_avoids_it(
    shape: dict[str, int], concurrency: int, *, is_so: bool
) -> None:
    """Then not to load is a fault, and elsewhere it is none."""
    work = work_of(**shape)
    seen = seen_of(work, cached=pass_of(len(work.asks) + 3, device_tokens=64), concurrency=concurrency)

    assert must_load(work, DEVICE_TOKENS, concurrency) is is_so
    assert faults(work, seen) == (["nothing was loaded back to the device"] if is_so else [])


@pytest.mark.parametrize(("device_tokens", "is_fault"), [(2000, True), (1500, False)])
def test_a_conversation_hits_the_device_where_it_fits_twice(device_tokens: int, *, is_fault: bool) -> None:
    """A device that it nearly fills may have given up some of it."""
    work = work_of(documents=1, questions=1)
    seen = seen_of(work, cached=pass_of(4, host_tokens=64), device_tokens=device_tokens)

    assert bool(faults(work, seen)) is is_fault


def test_chunks_are_counted_once_and_only_whole_ones() -> None:
    """Two prompts share the first of their chunks; an answer's last token has no KV."""
    first = Answer(prompt_token_ids=list(range(128)), token_ids=[])
    second = Answer(prompt_token_ids=[*range(64), *range(100, 150)], token_ids=list(range(15)))
    longer = replace(second, token_ids=[*range(14), 14])

    assert wanted_chunks([first]) == 2
    assert wanted_chunks([first, second]) == 3
    assert wanted_chunks([replace(longer, token_ids=list(range(14)))]) == 1
