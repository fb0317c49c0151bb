"""The executor promotes beside its steps, answers each promotion once, and computes on what it brought."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shared.messages.base import unpack_int32
from shared.messages.worker_plans import DetachHostPool
from tests.unit.worker.driven_executor import Driven, admit, back_up, batch, chunk, load, promote
from tests.unit.worker.fake_model import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]
LONG = [3, 4, 5]


class Promoting:
    """A worker that decodes ``d``; its transfer thread runs when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.driven = Driven(submit=self.waiting.append)
        self.host = self.driven.host_pool(8)
        for index in range(2):
            back_up(self.host, index, PROMPT, index)
        self.driven.give(admit(LONG, range(30, 40), request_id="d", max_tokens=20), batch(chunk(0, 3, request_id="d")))
        self.driven.run(most=1)

    def land(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@pytest.fixture
def made() -> Iterator[Promoting]:
    promoting = Promoting()
    yield promoting
    promoting.driven.close()


def test_a_promotion_is_no_barrier(made: Promoting) -> None:
    """Decode steps and a batch go on while it waits; it is answered when it is over, once."""
    made.driven.give(promote(PROMPT, [0, 1], [0, 1], [7, 2], promotion_id=12))
    number = made.driven.give(admit([6, 6], [50, 51, 52], request_id="n"), batch(chunk(0, 2, request_id="n")))
    made.driven.run(most=3)
    assert made.driven.executor.last_executed == number
    assert made.driven.promoted() == []

    made.land()
    made.driven.run()

    (promoted,) = made.driven.promoted()
    assert (promoted.promotion_id, promoted.ok, promoted.bad_host_pages) == (12, True, b"")
    assert promoted.load_us > 0
    assert made.driven.tokens("d") == continuation(LONG, 20)
    assert made.driven.tokens("n") == continuation([6, 6], 8)
    counters = made.driven.executor.counters
    assert (counters.promotions_done, counters.pages_promoted, counters.promotions_failed) == (1, 2, 0)
    assert counters.pages_loaded == 0


def test_a_request_computes_on_promoted_pages(made: Promoting) -> None:
    """They are a device hit like any other."""
    made.driven.give(promote(PROMPT, [0, 1], [0, 1], [7, 2]))
    made.driven.run(most=1)
    made.land()
    made.driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8), batch(chunk(8, 10)))

    made.driven.run()

    assert made.driven.tokens() == continuation(PROMPT, 8)


def test_the_end_of_a_promotion_is_told_by_an_idle_worker(made: Promoting) -> None:
    """The compute thread that sleeps for want of work is woken to say so."""
    made.driven.give(promote(PROMPT, [0], [0], [7]))
    made.driven.run()
    made.land()

    made.driven.executor.inbox.wait()  # Returns at once, or this test hangs.
    assert not made.driven.executor.run_one_step()

    assert [event.ok for event in made.driven.promoted()] == [True]


def test_a_corrupted_copy_fails_the_promotion_alone(made: Promoting) -> None:
    """The bad copy is named; decoding goes on."""
    made.host.pages[1, 2, 0] ^= 1
    made.driven.give(promote(PROMPT, [0, 1], [0, 1], [7, 2]))
    made.driven.run(most=1)
    made.land()

    made.driven.run()

    (promoted,) = made.driven.promoted()
    assert not promoted.ok
    assert unpack_int32(promoted.bad_host_pages) == [1]
    assert made.driven.tokens("d") == continuation(LONG, 20)
    assert made.driven.executor.counters.promotions_failed == 1


def test_a_batch_loads_before_a_promotion_that_came_first(made: Promoting) -> None:
    """The load takes the thread over after one piece; both are right in the end."""
    made.driven.give(promote(PROMPT, [0, 1], [0, 1], [20, 21]), promote(PROMPT, [1], [1], [22], promotion_id=2))
    made.driven.run(most=1)
    made.driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8))
    made.driven.give(batch(chunk(8, 10), loads=[load(PROMPT, [0, 1], [0, 1], [7, 2])]))

    def two_turns() -> None:
        made.driven.runner.on_forward = lambda: None
        for _ in range(2):
            made.waiting.pop(0)()

    made.driven.runner.on_forward = two_turns
    made.driven.run()

    assert made.driven.tokens() == continuation(PROMPT, 8)
    assert made.driven.done()[-1].stall_us == 0
    assert made.driven.promoted() == []
    made.land()
    made.driven.run()
    assert [(event.promotion_id, event.ok) for event in made.driven.promoted()] == [(1, True), (2, True)]


def test_a_detached_host_pool_fails_its_promotion(made: Promoting) -> None:
    """In order: the promotion had begun, and is answered after its last write."""
    made.driven.give(promote(PROMPT, [0, 1], [0, 1], [7, 2]), DetachHostPool(storage_id="s"))
    made.driven.run()
    assert made.driven.promoted() == []

    made.land()
    made.driven.run()

    assert [(event.ok, event.bad_host_pages) for event in made.driven.promoted()] == [(False, b"")]
