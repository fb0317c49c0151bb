"""While a batch loads the worker decodes, and no token of any request is another for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.memory import HostPoolView
from shared.messages.base import unpack_int32
from shared.messages.worker_events import BatchDone, RequestFinished, RequestPreempted
from shared.messages.worker_plans import DetachHostPool, WorkerOrder
from tests.unit.worker.driven_executor import (
    Driven,
    abort,
    admit,
    back_up,
    batch,
    chunk,
    extend,
    load,
    preempt,
    promote,
)
from tests.unit.worker.fake_model import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]
SIBLING = [*PROMPT[:8], 3, 3, 3]
LONG = [3, 4, 5]
SHORT = [9, 9, 8, 8, 7]
LOADED = [7, 2]


class Bubbles:
    """An executor with two decoding requests, ``d`` and ``e``, whose loads run when the test says so."""

    def __init__(self, *, max_tokens: int = 24) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.driven = Driven(submit=self.waiting.append)
        self.max_tokens = max_tokens
        self._happenings: dict[int, list[Callable[[], object]]] = {}
        self.host: HostPoolView = self.driven.host_pool(8)
        for index in range(2):
            back_up(self.host, index, PROMPT, index)
        self.driven.give(
            admit(LONG, range(30, 40), request_id="d", max_tokens=max_tokens),
            admit(SHORT, range(40, 50), request_id="e", max_tokens=max_tokens),
            batch(chunk(0, 3, request_id="d"), chunk(0, 5, request_id="e")),
        )
        self.driven.run(most=1)
        self.passes = 0
        self.driven.runner.on_forward = self._forward

    def _forward(self) -> None:
        self.passes += 1
        for happening in self._happenings.get(self.passes, []):
            happening()
        if not any(request.is_decoding for request in self.driven.executor._roster.requests.values()):
            self.land()  # This pass is about to wait at the gate.

    def when(self, number: int, happening: Callable[[], object]) -> None:
        """As forward pass ``number`` begins, counted from the start of the two, this happens."""
        self._happenings.setdefault(number, []).append(happening)

    def land(self) -> None:
        """Let everything that waits for the transfer thread happen."""
        while self.waiting:
            self.waiting.pop(0)()

    def begin(self, *behind: WorkerOrder, sibling: bool = False, prefill: bool = False) -> int:
        """Admit ``r`` and batch its last two tokens with a load of the others; returns the batch's number."""
        orders: list[WorkerOrder] = [admit(PROMPT, [*LOADED, 5, 6, 9], cached=8, host_tokens=8)]
        chunks = [chunk(8, 10)]
        if sibling:
            orders.append(admit(SIBLING, [*LOADED, 12, 13, 14], cached=8, host_tokens=8, request_id="q"))
            chunks.append(chunk(8, 11, request_id="q"))
        loads = [load(PROMPT, [0, 1], [0, 1], LOADED)]
        number = self.driven.give(*orders, batch(*chunks, loads=loads, fill_bubble=True, bubble_prefill=prefill))
        self.driven.give(*behind)
        return number

    def steps(self) -> list[list[int]]:
        """Rows of each segment of the passes since the beginning."""
        return [[rows for _, rows in step] for step in self.driven.runner.steps[1:]]

    def assert_decodes(self, *names: str) -> None:
        """These of ``d`` and ``e`` have said all that they should."""
        prompts = {"d": LONG, "e": SHORT}
        for name in names:
            assert self.driven.tokens(name) == continuation(prompts[name], self.max_tokens)


@pytest.fixture
def made() -> Iterator[Bubbles]:
    bubbles = Bubbles()
    yield bubbles
    bubbles.driven.close()


def test_decode_steps_fill_the_bubble(made: Bubbles) -> None:
    """Three whole steps of both requests while the load runs, then the chunk; all of it reported."""
    made.when(3, made.land)
    made.begin()

    made.driven.run(most=1)

    assert made.steps() == [[1, 1], [1, 1], [1, 1], [1, 1, 2]]
    done = made.driven.done()[-1]
    assert (done.bubble_tokens, done.loaded_tokens, done.computed_tokens, done.stall_us) == (6, 8, 2, 0)
    assert done.bubble_us > 0
    assert done.compute_us < done.bubble_us < done.load_us
    counters = made.driven.executor.counters
    assert (counters.bubble_tokens, counters.bubble_us) == (6, done.bubble_us)
    made.driven.run()
    made.assert_decodes("d", "e")
    assert made.driven.tokens() == continuation(PROMPT, 8)


def test_tokens_of_a_bubble_are_told_at_once(made: Bubbles) -> None:
    """Clients do not wait for the batch that is loading."""
    told: list[int] = []
    for step in (2, 4):
        made.when(step, lambda: told.append(len(made.driven.tokens("d"))))
    made.when(3, made.land)
    made.begin()

    made.driven.run(most=1)

    assert told == [2, 4]  # The fourth pass is the batch's own.


def test_without_the_wish_no_bubble_is_filled(made: Bubbles) -> None:
    """The batch waits at the gate, as ever: its load lands as its pass begins."""
    made.when(1, made.land)
    made.driven.give(admit(PROMPT, [*LOADED, 5, 6, 9], cached=8))
    made.driven.give(batch(chunk(8, 10), loads=[load(PROMPT, [0, 1], [0, 1], LOADED)]))

    made.driven.run(most=1)

    assert made.steps() == [[1, 1, 2]]
    assert made.driven.done()[-1].bubble_tokens == made.driven.done()[-1].bubble_us == 0


def test_with_nothing_to_decode_the_chunks_begin(made: Bubbles) -> None:
    """Layer by layer behind the load, as without bubbles."""
    made.driven.run()
    begun = len(made.steps())
    made.begin()

    made.driven.run(most=1)

    assert made.steps()[begun:] == [[2]]
    assert made.driven.done()[-1].bubble_tokens == 0


def test_a_bubble_ends_with_the_last_answer(made: Bubbles) -> None:
    """When all that decoded is over, the chunks begin and wait at the gate."""
    made.begin()

    made.driven.run()

    assert made.steps()[made.max_tokens - 1] == [2]
    made.assert_decodes("d", "e")
    assert made.driven.tokens() == continuation(PROMPT, 8)
    kinds = [type(event) for event in made.driven.events]
    assert kinds == [BatchDone, RequestFinished, BatchDone, RequestFinished]  # The first tells of two.


def test_a_learned_pace_lets_a_short_load_go_without_a_bubble(made: Bubbles) -> None:
    """A load that is expected to take less than a decode step delays its batch by none."""
    made.driven.executor._pace.page_ns = 1.0
    made.driven.run(most=1)
    begun = len(made.steps())
    made.when(made.passes + 1, made.land)
    made.begin()

    made.driven.run(most=1)

    assert made.steps()[begun:] == [[1, 1, 2]]


# -- orders in a bubble -----------------------------------------------------------------------------------------


def test_a_lease_that_comes_in_a_bubble_lets_its_request_go_on() -> None:
    """The request pauses while it has no room, and decodes on with the pages granted behind the batch."""
    made = Bubbles()
    try:
        made.driven.give(admit([4, 4, 4], [50], request_id="l", max_tokens=6), batch(chunk(0, 3, request_id="l")))
        made.driven.run(most=2)  # It has used up its only page.
        made.when(made.passes + 2, lambda: made.driven.give(extend([51, 52], request_id="l")))
        made.when(made.passes + 4, made.land)
        made.begin()
        begun = len(made.steps())

        made.driven.run(most=1)

        assert made.steps()[begun:] == [[1, 1], [1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1, 2]]
        made.driven.run()
        assert made.driven.tokens("l") == continuation([4, 4, 4], 6)
        made.assert_decodes("d", "e")
    finally:
        made.driven.close()


def test_aborts_and_preemptions_in_a_bubble_are_carried_out_in_it(made: Bubbles) -> None:
    """They are answered before the batch is done; what they said until then was right."""
    made.when(2, lambda: made.driven.give(abort("d"), preempt("e")))
    made.begin()

    made.driven.run(most=1)

    assert made.steps() == [[1, 1], [1, 1], [2]]
    kinds = [type(event) for event in made.driven.events[1:]]
    assert kinds == [RequestFinished, RequestPreempted, BatchDone]
    (preempted,) = made.driven.preempted()
    assert unpack_int32(preempted.output) == continuation(SHORT, 3)
    assert made.driven.tokens("d") == continuation(LONG, 3)
    made.driven.run()
    assert made.driven.tokens() == continuation(PROMPT, 8)


def test_overtaking_orders_count_as_executed_with_the_batch(made: Bubbles) -> None:
    """Until then everything from the batch on is unfinished."""
    seen: list[int] = []
    number = made.begin(abort("d"))
    made.when(2, lambda: seen.append(made.driven.executor.last_executed))
    made.when(3, made.land)

    made.driven.run(most=1)

    assert made.driven.finished()[0].request_id == "d"
    assert seen == [number - 1]
    assert made.driven.executor.last_executed == number + 1


@pytest.mark.parametrize(
    "barrier",
    [abort("r"), preempt("r"), batch(chunk(0, 1, request_id="gone")), DetachHostPool(storage_id="s")],
    ids=lambda order: type(order).__name__,
)
def test_what_could_conflict_waits_and_so_does_all_behind_it(made: Bubbles, barrier: WorkerOrder) -> None:
    """Orders keep their order: an abort behind a barrier is not carried out in the bubble."""
    made.begin(barrier, abort("d"))
    made.when(3, made.land)

    made.driven.run(most=1)

    assert made.steps() == [[1, 1], [1, 1], [1, 1], [1, 1, 2]]
    assert not made.driven.finished()
    assert not made.driven.preempted()
    assert made.driven.done()[-1].failed == ()
    made.driven.run()
    assert [event.request_id for event in made.driven.finished()][-1] == "e"
    assert made.driven.tokens("d") == continuation(LONG, len(made.driven.tokens("d")))
    made.assert_decodes("e")


def test_a_request_admitted_in_a_bubble_runs_after_it(made: Bubbles) -> None:
    """Its own batch is a barrier."""
    made.begin(admit([6, 6, 6], [20, 21, 22], request_id="n"), batch(chunk(0, 3, request_id="n")))
    made.when(2, made.land)

    made.driven.run()

    assert made.driven.tokens("n") == continuation([6, 6, 6], 8)
    made.assert_decodes("d", "e")


def test_closing_the_inbox_ends_the_bubble(made: Bubbles) -> None:
    """A worker that stops does not decode until its load is there."""
    made.when(2, made.driven.executor.inbox.close)
    made.when(3, made.land)
    made.begin()

    made.driven.run(most=1)

    assert made.steps() == [[1, 1], [1, 1], [1, 1, 2]]


def test_a_request_on_a_loading_page_sits_the_bubble_out(made: Bubbles) -> None:
    """A plan that contradicts itself does not make attention read what is half written."""
    made.driven.give(extend([LOADED[0]], request_id="d"))
    made.when(2, made.land)
    made.begin()

    made.driven.run(most=1)

    assert made.steps() == [[1], [1], [1, 1, 2]]


# -- batches in a bubble ----------------------------------------------------------------------------------------

NEW = [6, 6, 6]


def admit_new(pages: range = range(20, 23), name: str = "n") -> WorkerOrder:
    return admit(NEW, pages, request_id=name)


def test_a_batch_that_loads_nothing_fills_the_bubble(made: Bubbles) -> None:
    """It is computed with the decoding requests and answered first; its request decodes on in the bubble."""
    made.when(3, made.land)
    number = made.begin(admit_new(), batch(chunk(0, 3, request_id="n")), prefill=True)

    made.driven.run(most=1)

    assert made.steps() == [[1, 1, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1, 2]]
    assert [done.plan for done in made.driven.done()[1:]] == [number + 2, number]
    assert made.driven.done()[-1].bubble_tokens == 6
    made.driven.run()
    assert made.driven.tokens("n") == continuation(NEW, 8)
    assert made.driven.tokens() == continuation(PROMPT, 8)
    made.assert_decodes("d", "e")


def test_a_batch_fills_a_bubble_in_which_nothing_decodes(made: Bubbles) -> None:
    """Chunks need no decoding request beside them."""
    made.driven.run()
    begun = len(made.steps())
    made.when(made.passes + 1, made.land)
    made.begin(admit_new(), batch(chunk(0, 3, request_id="n")), prefill=True)

    made.driven.run(most=1)

    assert made.steps()[begun:] == [[3], [1, 2]]


def test_batches_in_a_bubble_count_as_executed_with_the_one_that_loads(made: Bubbles) -> None:
    """Until then everything from that one on is unfinished."""
    seen: list[int] = []
    made.when(2, lambda: seen.append(made.driven.executor.last_executed))
    made.when(3, made.land)
    number = made.begin(admit_new(), batch(chunk(0, 3, request_id="n")), prefill=True)

    made.driven.run(most=1)

    assert seen == [number - 1]
    assert made.driven.executor.last_executed == number + 2


def test_a_batch_that_takes_longer_than_the_load_waits_for_it(made: Bubbles) -> None:
    """The chunks of the loading batch would be the later for it."""
    made.driven.executor._pace.page_ns, made.driven.executor._pace.row_ns = 1e6, 1e9
    made.when(2, made.land)
    made.begin(admit_new(), batch(chunk(0, 3, request_id="n")), prefill=True)

    made.driven.run()

    assert [2 in step for step in made.steps()].index(True) < [3 in step for step in made.steps()].index(True)
    assert made.driven.tokens("n") == continuation(NEW, 8)


@pytest.mark.parametrize(
    "behind",
    [
        [batch(chunk(10, 11))],
        [batch(chunk(0, 3, request_id="n"), loads=[load(NEW, [2], [2], [20], request_id="n")])],
        [abort("r"), batch(chunk(0, 3, request_id="n"))],
        [
            admit([*PROMPT[:4], 3], [LOADED[0], 24], request_id="m", cached=4),
            batch(chunk(4, 5, request_id="m")),
        ],
    ],
    ids=["of one of its requests", "with a load", "behind what waits", "on a page that is half written"],
)
def test_batches_that_could_conflict_wait(made: Bubbles, behind: list[WorkerOrder]) -> None:
    """The bubble is filled with decoding alone."""
    made.when(2, made.land)
    made.begin(admit_new(), *behind, prefill=True)

    made.driven.run(most=1)

    assert made.steps() == [[1, 1], [1, 1], [1, 1, 2]]


def test_a_batch_that_breaks_in_a_bubble_costs_its_request_alone(made: Bubbles) -> None:
    """It is answered as failed, and everybody else gets their tokens."""

    def broken() -> None:
        raise RuntimeError("out of memory")

    for step in (1, 4):  # All together, and the chunk alone behind the two decoding requests.
        made.when(step, broken)
    made.when(6, made.land)
    made.begin(admit_new(), batch(chunk(0, 3, request_id="n")), prefill=True)

    made.driven.run()

    assert [done.failed for done in made.driven.done()[1:]] == [("n",), ()]
    assert made.driven.tokens("n") == []
    made.assert_decodes("d", "e")
    assert made.driven.tokens() == continuation(PROMPT, 8)


# -- loads that fail in a bubble --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["byte", "identity"])
def test_a_load_that_fails_in_a_bubble_takes_all_that_share_it(made: Bubbles, fault: str) -> None:
    """Both requests on its pages fail, nobody computes on missing KV, and decoding never notices."""
    if fault == "byte":
        made.host.pages[1, 2, 5] ^= 1
    else:
        back_up(made.host, 1, SHORT, 0)
    made.when(3, made.land)
    made.begin(sibling=True)

    made.driven.run()

    done = made.driven.done()[-1]
    assert sorted(done.failed) == ["q", "r"]
    assert [unpack_int32(failure.host_pages) for failure in done.load_failures] == [[1]]
    assert (done.bubble_tokens, done.computed_tokens, done.loaded_tokens) == (6, 0, 4)
    assert made.driven.items("r") == made.driven.items("q") == []
    made.assert_decodes("d", "e")


def test_a_decode_step_that_breaks_in_a_bubble_costs_its_request_alone(made: Bubbles) -> None:
    """The bubble goes on for the other one, and the batch is computed."""

    def broken() -> None:
        raise RuntimeError("out of memory")

    made.when(1, broken)  # Both together.
    made.when(2, broken)  # The first of them alone.
    made.when(6, made.land)
    made.begin()

    made.driven.run(most=1)

    assert made.driven.finished()[0].reason == "error"
    assert made.driven.done()[-1].failed == ()
    made.driven.run()
    made.assert_decodes("e")
    assert made.driven.tokens() == continuation(PROMPT, 8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(data=st.data())
def test_bubbles_change_no_token(data: st.DataObject) -> None:
    """Load landing at any step or never before the end, corrupted or whole, with orders at any step of the bubble:
    every token of every request is the greedy one.
    """
    made = Bubbles(max_tokens=data.draw(st.integers(1, 12), label="max_tokens"))
    try:
        corrupted = data.draw(st.booleans(), label="corrupted")
        if corrupted:
            layer = data.draw(st.integers(0, 2), label="layer")
            made.host.pages[data.draw(st.integers(0, 1), label="page"), layer, 3] ^= 4
        candidates: list[WorkerOrder] = [
            abort("d"),
            preempt("e"),
            extend([55], request_id="e"),
            admit([6, 6, 6], [20, 21, 22], request_id="n"),
            promote(PROMPT, [0], [0], [56]),
            batch(chunk(0, 3, request_id="n")),
            abort("r"),
        ]
        for order in data.draw(st.permutations(candidates), label="orders"):
            step = data.draw(st.integers(1, 8), label="at")
            made.when(step, partial(made.driven.give, order))
        landing = data.draw(st.integers(1, 14), label="landing")
        made.when(landing, made.land)
        loading = made.begin(sibling=True, prefill=data.draw(st.booleans(), label="prefill"))
        made.driven.run()
        made.land()
        made.driven.run()

        prompts = {"d": LONG, "e": SHORT, "r": PROMPT, "q": SIBLING, "n": [6, 6, 6]}
        for name, prompt in prompts.items():
            told = made.driven.tokens(name)
            assert told == continuation(prompt, len(told))
        done = next(done for done in made.driven.done() if done.plan == loading)
        assert set(done.failed) == ({"q", "r"} if corrupted else set())
        if not corrupted:
            assert made.driven.tokens("q") == continuation(SIBLING, 8)
        else:
            assert made.driven.tokens("q") == made.driven.tokens("r") == []
    finally:
        made.driven.close()
