"""The executor computes what plans say, as a plain function of the tokens, whatever runs beside it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker import counting
from services.worker.counters import Counters
from services.worker.outcome import Outcome
from shared.messages.base import unpack_int32
from shared.messages.requests import SamplingParams
from shared.messages.worker_events import BatchDone, RequestFinished
from tests.unit.worker.driven_executor import Driven, abort, admit, batch, chunk, extend, preempt
from tests.unit.worker.fake_model import EOS, MAX_CONTEXT, VOCAB_SIZE, continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]


def test_a_prompt_in_one_chunk_gives_the_greedy_answer(driven: Driven) -> None:
    """Tokens, text, events and counters of the simplest request."""
    number = driven.give(admit(PROMPT, range(10)), batch(chunk(0, 10)))

    driven.run()

    answer = continuation(PROMPT, 8)
    assert driven.tokens() == answer
    assert driven.text() == "".join(chr(77 + token) for token in answer)
    assert [event.plan for event in driven.done()] == [number]
    (finished,) = driven.finished()
    assert (finished.reason, unpack_int32(finished.output)) == ("length", answer)
    counters = driven.executor.counters
    assert (counters.prefill_tokens_computed, counters.decode_tokens, counters.steps) == (10, 7, 8)
    assert driven.executor.last_executed == number
    assert driven.executor.request_ids == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30)
@given(data=st.data())
def test_chunked_prefill_beside_decode_changes_nothing(data: st.DataObject) -> None:
    """Any requests, cut into any chunks, batched in any way, on any pages: every answer is the greedy one."""
    made = Driven()
    try:
        prompts = data.draw(
            st.lists(st.lists(st.integers(3, 12), min_size=1, max_size=14), min_size=1, max_size=4), label="prompts"
        )
        free = data.draw(st.permutations(range(64)), label="pages")
        left = {}
        for number, prompt in enumerate(prompts):
            needed = -(-(len(prompt) + 8) // 4)
            made.give(admit(prompt, free[:needed], request_id=f"r{number}"))
            free = free[needed:]
            left[f"r{number}"] = (0, len(prompt))
        while left:
            names = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
            chunks = []
            for name in names:
                start, end = left[name]
                stop = data.draw(st.integers(start + 1, end))
                chunks.append(chunk(start, stop, request_id=name))
                left[name] = (stop, end)
                if stop == end:
                    del left[name]
            made.give(batch(*chunks))
            if data.draw(st.booleans()):
                made.run(most=2)
        made.run()

        for number, prompt in enumerate(prompts):
            assert made.tokens(f"r{number}") == continuation(prompt, 8)
        assert not any(event.failed for event in made.done())
    finally:
        made.close()


def test_a_batch_is_one_step(driven: Driven) -> None:
    """Two batches take two steps, the second with a token of the request that the first has brought to decode."""
    driven.give(
        admit(PROMPT, range(10)),
        admit(PROMPT[:6], range(10, 16), request_id="q"),
        batch(chunk(0, 10)),
        batch(chunk(0, 6, request_id="q")),
    )

    driven.run(most=2)

    assert driven.runner.steps == [[(0, 10)], [(10, 1), (0, 6)]]


def test_each_gateway_gets_one_message_a_step(driven: Driven) -> None:
    """Items are grouped by gateway, and each step makes one report."""
    for number in range(4):
        driven.give(
            admit(PROMPT, range(number * 8, number * 8 + 8), request_id=f"r{number}", gateway_id=f"g{number % 2}")
        )
    driven.give(batch(*(chunk(0, 10, request_id=f"r{number}") for number in range(4))))

    driven.run()

    assert [report.step for report in driven.reports] == list(range(1, 9))
    assert all(set(report.items) == {"g0", "g1"} for report in driven.reports)
    assert all(len(items) == 2 for report in driven.reports for items in report.items.values())


def test_batch_done_comes_before_what_the_step_brought(driven: Driven) -> None:
    """The scheduler learns that the prompt is computed before it learns that the answer is over."""
    driven.give(admit(PROMPT, range(4), max_tokens=1), batch(chunk(0, 10)))

    driven.run()

    assert [type(event) for event in driven.events] == [BatchDone, RequestFinished]


def test_what_a_step_brought_is_posted_before_it_is_counted(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are waited for, and figures are not."""
    count, posted = counting.count_step, list[int]()

    def counted(counters: Counters, outcome: Outcome) -> None:
        posted.append(len(driven.tokens()))
        count(counters, outcome)

    monkeypatch.setattr(counting, "count_step", counted)
    driven.give(admit(PROMPT, range(10)), batch(chunk(0, 10)))

    driven.run()

    assert posted == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_report_says_whether_an_answer_begins(driven: Driven) -> None:
    """With its first token, and with no other."""
    driven.give(admit(PROMPT, range(10)), batch(chunk(0, 10)))

    driven.run()

    begins = [report.begins for report in driven.reports if report.items]
    assert begins == [True] + [False] * 7


def test_usage_and_timing_are_true(driven: Driven) -> None:
    """They come with the first item, usage with the last one too; timestamps are in order."""
    driven.give(admit(PROMPT, range(10), cached=0), batch(chunk(0, 4)), batch(chunk(4, 10)))

    driven.run()

    items = driven.items()
    assert [item.usage is not None for item in items] == [True, *[False] * 6, True]
    assert items[0].usage is not None
    assert items[0].usage.computed_tokens == 10
    timing = items[0].timing
    assert timing is not None
    assert timing.loaded_ns == 0
    stamps = [timing.received_ns, timing.accepted_ns, timing.admitted_ns, timing.started_ns, timing.first_token_ns]
    assert stamps == sorted(stamps)
    assert all(item.timing is None for item in items[1:])


# -- leases -----------------------------------------------------------------------------------------------------


def test_a_request_without_room_waits_for_its_lease(driven: Driven) -> None:
    """It asks once, sits out, and goes on with the same answer when pages come."""
    driven.give(admit(PROMPT, range(3), max_tokens=9), batch(chunk(0, 10)))
    driven.run()
    assert driven.tokens() == continuation(PROMPT, 3)
    assert [event.generated for event in driven.lease_requests()] == [2]

    driven.give(extend([30, 31]))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 9)
    assert driven.finished()[0].reason == "length"


def test_one_message_asks_for_all_that_would_ask_soon(driven: Driven) -> None:
    """Whoever has used half of a long lease joins one that must ask now, and asks no more until it has its pages."""
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    driven.give(admit(PROMPT, range(20), request_id="q", params=long), batch(chunk(0, 10, request_id="q")))
    for _ in range(35):  # 70 tokens of room, of which fewer than half are left.
        driven.executor.run_one_step()
    assert driven.lease_requests() == []

    driven.give(admit(PROMPT[:9], range(30, 33), params=long), batch(chunk(0, 9)))
    driven.run()

    asked = driven.lease_requests()[0]
    assert (asked.request_id, asked.generated) == ("q", 38)  # With room for 33 more it need not ask yet.
    assert [(other.request_id, other.generated) for other in asked.others] == [("r", 3)]
    assert len(driven.lease_requests()) == 1


def test_a_starved_request_does_not_hold_others_up(driven: Driven) -> None:
    """Those with room go on."""
    driven.give(
        admit(PROMPT, range(3)),
        admit(PROMPT[:5], range(10, 16), request_id="q"),
        batch(chunk(0, 10), chunk(0, 5, request_id="q")),
    )

    driven.run()

    assert len(driven.tokens("r")) == 3
    assert driven.tokens("q") == continuation(PROMPT[:5], 8)


def test_a_lease_for_another_attempt_means_nothing(driven: Driven) -> None:
    """Its pages belong to somebody else by now."""
    driven.give(admit(PROMPT, range(3)), batch(chunk(0, 10)), extend([30], attempt=7), extend([30], request_id="x"))

    driven.run()

    assert len(driven.tokens()) == 3


# -- ends -------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_request(driven: Driven) -> None:
    """The token is part of the output; its text is not shown."""
    answer = continuation(PROMPT, 8)
    stop = answer[3]
    count = answer.index(stop) + 1
    params = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(stop,))
    driven.give(admit(PROMPT, range(10), params=params), batch(chunk(0, 10)))

    driven.run()

    assert driven.tokens() == answer[:count]
    last = driven.items()[-1]
    assert (last.finish, last.stop_match, last.text) == ("stop", stop, "")
    assert driven.finished()[0].reason == "stop"


def test_the_context_ends_a_request(driven: Driven) -> None:
    """Not one position beyond the model's last is computed."""
    prompt = [3 + number % 9 for number in range(MAX_CONTEXT - 3)]
    driven.give(admit(prompt, range(64), max_tokens=50), batch(chunk(0, len(prompt))))

    driven.run()

    assert len(driven.tokens()) == 3
    assert driven.finished()[0].reason == "length"
    assert max(context + rows for step in driven.runner.steps for context, rows in step) == MAX_CONTEXT - 1


def test_an_abort_ends_a_running_request_once(driven: Driven) -> None:
    """A second abort is not answered: the end is on its way."""
    driven.give(admit(PROMPT, range(10)), batch(chunk(0, 10)))
    driven.run(most=3)
    driven.give(abort(reason="deadline"), abort(reason="deadline"))

    driven.run()

    (finished,) = driven.finished()
    assert (finished.reason, unpack_int32(finished.output)) == ("deadline", continuation(PROMPT, 3))
    assert [item.finish for item in driven.items()] == [None, None, None, "deadline"]
    assert driven.items()[-1].index == 3


def test_a_free_form_abort_reason_is_a_cancellation(driven: Driven) -> None:
    """Clients see one of the documented reasons."""
    driven.give(admit(PROMPT, range(10)), abort(reason="client_disconnected"))

    driven.run()

    assert driven.finished()[0].reason == "cancelled"


def test_an_abort_takes_effect_after_the_batches_before_it(driven: Driven) -> None:
    """Orders are carried out in order: the chunk is computed, then the request ends."""
    driven.give(admit(PROMPT, range(10)), batch(chunk(0, 10)), abort())

    driven.run()

    assert driven.done()[0].failed == ()
    assert unpack_int32(driven.finished()[0].output) == continuation(PROMPT, 1)


def test_orders_for_requests_that_were_never_here_are_answered(driven: Driven) -> None:
    """Nobody waits for ever for an answer."""
    driven.give(abort("x"), preempt("y"))

    driven.run()

    assert [(event.request_id, event.output) for event in driven.finished()] == [("x", b"")]
    assert [(event.request_id, event.output) for event in driven.preempted()] == [("y", b"")]


def test_orders_for_older_attempts_are_void(driven: Driven) -> None:
    """The newer attempt replaced it, silently, and goes on."""
    driven.give(
        admit(PROMPT, range(10)),
        admit(PROMPT, range(20, 30), attempt=2),
        abort(attempt=1),
        preempt(attempt=1),
        batch(chunk(0, 10, attempt=2)),
    )

    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)
    assert [event.attempt for event in driven.finished()] == [2]
    assert driven.preempted() == []


def test_an_older_or_equal_admission_is_ignored(driven: Driven) -> None:
    """What runs goes on running."""
    driven.give(admit(PROMPT, range(10), attempt=2), admit(PROMPT[:3], range(20, 30), attempt=2))
    driven.give(admit(PROMPT[:3], range(20, 30), attempt=1), batch(chunk(0, 10, attempt=2)))

    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)


# -- preemption and resumption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [1, 4, 7])
def test_a_preempted_request_resumes_where_it_was(driven: Driven, generated: int) -> None:
    """The next attempt, on other pages, continues tokens, text and positions without a seam."""
    text = "".join(chr(77 + token) for token in continuation(PROMPT, 8))
    params = SamplingParams(max_tokens=8, temperature=0, stop=(text[5:7] + "never",))
    driven.give(admit(PROMPT, range(10), params=params), batch(chunk(0, 10)))
    driven.run(most=generated)
    driven.give(preempt())
    driven.run()
    (event,) = driven.preempted()
    known = PROMPT + unpack_int32(event.output)
    assert len(known) == len(PROMPT) + generated

    driven.give(admit(known, range(20, 30), attempt=2, prompt_tokens=10, params=params))
    driven.give(batch(chunk(0, len(known), attempt=2)))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)
    assert driven.text() == text
    assert unpack_int32(driven.finished()[0].output) == continuation(PROMPT, 8)
    assert [name for report in driven.reports for name in report.preempted] == ["r"]
    recalled = [item for report in driven.reports for item in report.recalled]
    assert [token for item in recalled for token in item.tokens] == continuation(PROMPT, generated)
    assert [item.text for item in recalled] == [item.text for item in driven.items()[:generated]]


def test_a_resumed_request_that_had_ended_ends_at_once(driven: Driven) -> None:
    """Its worker died after the last token and before it could say so."""
    driven.give(admit([*PROMPT, 20, EOS], range(10), attempt=2, prompt_tokens=10))

    driven.run()

    (item,) = driven.items()
    assert (item.index, item.tokens, item.finish) == (2, (), "stop")
    assert unpack_int32(driven.finished()[0].output) == [20, EOS]


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        admit([5, VOCAB_SIZE], range(4)),
        admit([5, -1], range(4)),
        admit(PROMPT, range(2)),
        admit(PROMPT, [0, 1, 64]),
        admit(PROMPT, range(4), cached=10),
        admit(PROMPT, range(4), prompt_tokens=11),
        admit([3] * (MAX_CONTEXT + 1), range(64)),
    ],
)
def test_a_contradictory_admission_is_refused(driven: Driven, order: object) -> None:
    """Both the scheduler and the gateway learn of the error; chunks of it are reported as failed."""
    number = driven.give(order, batch(chunk(0, 2)))  # type: ignore[arg-type]

    driven.run()

    assert [event.reason for event in driven.finished()] == ["error"]
    assert [item.finish for item in driven.items()] == ["error"]
    assert driven.done() == [BatchDone(worker_id="w", incarnation="inc", plan=number, failed=("r",), compute_us=1)]
    assert driven.runner.steps == []


def test_a_lease_outside_the_pool_ends_the_request(driven: Driven) -> None:
    """It would make attention read memory that is not there."""
    driven.give(admit(PROMPT, range(3)), extend([64]))

    driven.run()

    assert driven.finished()[0].reason == "error"
    assert "lease" in driven.finished()[0].error
