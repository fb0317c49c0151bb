"""Admissions that refer to texts give the same tokens as whole ones, or a report of the text that is missing."""

from __future__ import annotations

from msgspec import structs

from shared.compact_messages import compact_admission
from shared.messages.worker_events import TextMissing
from shared.messages.worker_plans import AbortRequest, AdmitRequest, PreemptRequest, TextBase
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk

PROMPT = [*range(2, 26)]
PAGES = [*range(8)]


def referring(request_id: str = "r", *, attempt: int = 1, text: int = 5) -> AdmitRequest:
    """The same prompt with three tokens more, and a page table that differs from the fifth page on."""
    order = admit(
        [*PROMPT, 30, 31, 32], [*PAGES[:4], 12, 13, 14, 15], request_id=request_id, attempt=attempt, cached=16
    )
    rest, pages = order.tokens[20 * 4 :], order.pages[4 * 4 :]
    return structs.replace(order, tokens=rest, pages=pages, base=TextBase(text=text, tokens=20, pages=4))


def test_an_answer_is_the_same_as_of_an_admission_that_says_it_all(driven: Driven) -> None:
    """Tokens, pages and what is cached are those of the whole order."""
    first = structs.replace(admit(PROMPT, PAGES, request_id="first", max_tokens=1), text=5)
    driven.give(first, batch(chunk(0, 24, request_id="first")))
    driven.give(referring("again"), batch(chunk(16, 27, request_id="again")))
    whole = admit([*PROMPT, 30, 31, 32], [*PAGES[:4], 20, 21, 22, 23], request_id="whole", cached=16)
    driven.give(whole, batch(chunk(16, 27, request_id="whole")))
    driven.run()

    assert driven.tokens("again") == driven.tokens("whole") != []


def test_a_compact_admission_is_the_same(driven: Driven) -> None:
    """Whole and as a reference; what it keeps is what it stands for."""
    first = structs.replace(admit(PROMPT, PAGES, request_id="first", max_tokens=1), text=5)
    driven.give(compact_admission(first), batch(chunk(0, 24, request_id="first")))
    driven.give(compact_admission(referring("again")), batch(chunk(16, 27, request_id="again")))
    whole = admit([*PROMPT, 30, 31, 32], [*PAGES[:4], 20, 21, 22, 23], request_id="whole", cached=16)
    driven.give(whole, batch(chunk(16, 27, request_id="whole")))
    driven.run()

    assert compact_admission(first).tokens == b""
    assert driven.tokens("again") == driven.tokens("whole") != []


def test_an_admission_that_cannot_be_read_is_refused(driven: Driven) -> None:
    """Its caller learns it, and other requests go on."""
    broken = structs.replace(admit(PROMPT, PAGES, request_id="broken"), tokens=b"", compact=b"\5")
    driven.give(broken, admit(PROMPT, PAGES), batch(chunk(0, 24)))
    driven.run()

    assert [(end.request_id, end.reason) for end in driven.finished()][:1] == [("broken", "error")]
    assert driven.tokens("r") != []


def test_a_text_that_is_not_kept_is_told(driven: Driven) -> None:
    """Nothing is computed, no client hears of it, and the order to stop the request is answered."""
    driven.give(referring(), batch(chunk(16, 27)), PreemptRequest(request_id="r", attempt=1))
    driven.run()

    who = {"worker_id": "w", "incarnation": "inc"}
    assert driven.events[0] == TextMissing(**who, request_id="r", attempt=1, text=5)
    assert [done.failed for done in driven.done()] == [("r",)]
    assert [(said.attempt, said.output) for said in driven.preempted()] == [(1, b"")]
    assert driven.items() == []
    assert driven.executor.counters.texts_missing == 1


def test_an_attempt_that_ran_here_before_does_not_keep_it_from_being_answered(driven: Driven) -> None:
    """What is remembered of the end of an earlier attempt says nothing of this one."""
    driven.give(admit(PROMPT, PAGES), PreemptRequest(request_id="r", attempt=1))
    driven.give(referring(attempt=2), PreemptRequest(request_id="r", attempt=2))
    driven.run()

    assert [said.attempt for said in driven.preempted()] == [1, 2]


def test_one_that_is_to_end_meanwhile_ends(driven: Driven) -> None:
    """Its caller gave up before the scheduler heard that a text is missing."""
    driven.give(referring(), AbortRequest(request_id="r", attempt=1, reason="cancelled"))
    driven.run()

    assert [(end.request_id, end.reason) for end in driven.finished()] == [("r", "cancelled")]


def test_a_text_of_a_request_that_was_refused_is_kept(driven: Driven) -> None:
    """The scheduler cannot know what a worker refuses, and refers to it all the same."""
    driven.give(structs.replace(admit([*PROMPT, 10**6], PAGES, request_id="refused"), text=5))
    driven.give(referring(), batch(chunk(0, 27)))
    driven.run()

    assert [end.request_id for end in driven.finished()] == ["refused"]
    assert driven.tokens("r") != []
