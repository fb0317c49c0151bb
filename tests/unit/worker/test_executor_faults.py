"""Loads that fail and computations that raise cost the requests that they belong to, and no others."""

from __future__ import annotations

import pytest

from services.worker.passes import LONE_FAILURES
from services.worker.step_results import REQUEST_FAILURES
from shared.errors import InternalError
from shared.messages.base import unpack_int32
from tests.unit.worker.driven_executor import Driven, admit, back_up, batch, chunk, load
from tests.unit.worker.fake_model import POISON, continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]
OTHER = [9, 9, 8, 8, 7, 7, 6]


def test_loaded_pages_take_the_place_of_computed_ones(driven: Driven) -> None:
    """Eight tokens come from the host pool, two are computed, and the answer is the same."""
    host = driven.host_pool(4)
    back_up(host, 3, PROMPT, 0)
    back_up(host, 1, PROMPT, 1)
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8, host_tokens=8))
    driven.give(batch(chunk(8, 10), loads=[load(PROMPT, [0, 1], [3, 1], [7, 2])]))

    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)
    first = driven.items()[0]
    assert first.usage is not None
    assert (first.usage.host_tokens, first.usage.computed_tokens) == (8, 2)
    assert first.timing is not None
    assert first.timing.loaded_ns > 0
    assert driven.done()[0].load_us > 0
    counters = driven.executor.counters
    assert (counters.pages_loaded, counters.loads_failed, counters.steps_repeated) == (2, 0, 0)


@pytest.mark.parametrize("fault", ["byte", "identity", "pool"])
def test_a_failed_load_fails_its_request_and_no_other(driven: Driven, fault: str) -> None:
    """The step is repeated without it; nobody gets a token from the thrown-away pass."""
    host = driven.host_pool(4)
    back_up(host, 0, PROMPT, 0)
    back_up(host, 1, PROMPT, 1)
    back_up(host, 2, OTHER, 0)
    storage = "s"
    if fault == "byte":
        host.pages[1, 2, 5] ^= 1
    elif fault == "identity":
        back_up(host, 1, OTHER, 0)
    else:
        storage = "gone"
    driven.give(admit([3, 4, 5], range(30, 34), request_id="d"), batch(chunk(0, 3, request_id="d")))
    driven.run(most=2)
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8, host_tokens=8))
    driven.give(admit(OTHER, [10, 11, 12, 13], cached=4, host_tokens=4, request_id="q"))
    driven.give(
        batch(
            chunk(8, 10),
            chunk(4, 7, request_id="q"),
            loads=[
                load(PROMPT, [0, 1], [0, 1], [7, 2], storage_id=storage),
                load(OTHER, [0], [2], [10], request_id="q"),
            ],
        )
    )
    driven.run()

    done = driven.done()[-1]
    assert done.failed == ("r",)
    (failure,) = done.load_failures
    assert failure.storage_id == storage
    assert unpack_int32(failure.host_pages) == ([0, 1] if fault == "pool" else [1])
    assert driven.tokens("q") == continuation(OTHER, 8)
    assert driven.tokens("d") == continuation([3, 4, 5], 8)
    assert driven.tokens("r") == []
    assert driven.executor.counters.steps_repeated == 1


def test_a_request_goes_on_after_its_load_has_failed(driven: Driven) -> None:
    """Planned again without the load it recomputes, and its usage no longer claims the host's tokens."""
    host = driven.host_pool(4)
    back_up(host, 0, PROMPT, 0)
    host.pages[0, 0, 0] ^= 1
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=4, host_tokens=4))
    driven.give(batch(chunk(4, 8), loads=[load(PROMPT, [0], [0], [7])]), batch(chunk(8, 10)))
    driven.run()
    assert [done.failed for done in driven.done()] == [("r",), ("r",)]  # The second stood on the first.

    driven.give(batch(chunk(0, 10)))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)
    usage = driven.items()[0].usage
    assert usage is not None
    assert (usage.host_tokens, usage.computed_tokens) == (0, 10)


def test_usage_says_what_came_from_disk_unless_its_load_failed(driven: Driven) -> None:
    """Tokens that were fetched for the request are its own kind; those that were lost are computed ones."""
    host = driven.host_pool(4)
    back_up(host, 0, PROMPT, 0)
    back_up(host, 1, PROMPT, 1)
    host.pages[1, 0, 0] ^= 1
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8, host_tokens=4, disk_tokens=4))
    driven.give(batch(chunk(8, 10), loads=[load(PROMPT, [0, 1], [0, 1], [7, 2])]))
    driven.run()

    driven.give(batch(chunk(0, 10)))
    driven.run()

    usage = driven.items()[0].usage
    assert usage is not None
    assert usage.disk_tokens == 0
    assert driven.tokens() == continuation(PROMPT, 8)


def test_a_load_may_be_planned_again(driven: Driven) -> None:
    """A later batch can bring the pages that an earlier one failed to bring."""
    host = driven.host_pool(4)
    back_up(host, 0, PROMPT, 0)
    host.pages[0, 0, 0] ^= 1
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=4))
    driven.give(batch(chunk(4, 10), loads=[load(PROMPT, [0], [0], [7])]))
    driven.run()
    back_up(host, 2, PROMPT, 0)

    driven.give(batch(chunk(4, 10), loads=[load(PROMPT, [0], [2], [7])]))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)


def test_a_good_page_of_a_failed_load_is_lost_to_all(driven: Driven) -> None:
    """The scheduler undoes a failed load as a whole, so a request on its good pages fails with it, and so does one
    whose chunk comes in the next batch. A request on another load goes on.
    """
    host = driven.host_pool(4)
    back_up(host, 0, PROMPT, 0)
    back_up(host, 1, PROMPT, 1)
    back_up(host, 2, OTHER, 0)
    host.pages[1, 2, 0] ^= 1
    sibling = [*PROMPT[:4], 3, 3, 3]
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8, host_tokens=8))
    driven.give(admit(sibling, [7, 12, 13, 14], cached=4, host_tokens=4, request_id="q"))
    driven.give(admit(sibling, [7, 15, 16, 17], cached=4, host_tokens=4, request_id="later"))
    driven.give(admit(OTHER, [10, 20, 21, 22], cached=4, host_tokens=4, request_id="other"))
    loads = [load(PROMPT, [0, 1], [0, 1], [7, 2]), load(OTHER, [0], [2], [10], request_id="other")]
    driven.give(batch(chunk(8, 10), chunk(4, 7, request_id="q"), chunk(4, 7, request_id="other"), loads=loads))
    driven.give(batch(chunk(4, 7, request_id="later")))

    driven.run()

    first, second = driven.done()
    assert sorted(first.failed) == ["q", "r"]
    assert unpack_int32(first.load_failures[0].host_pages) == [1]
    assert second.failed == ("later",)
    assert driven.items("r") == driven.items("q") == driven.items("later") == []
    assert driven.tokens("other") == continuation(OTHER, 8)
    assert (first.loaded_tokens, first.computed_tokens) == (8, 3)


@pytest.mark.parametrize("fault", ["refused", "raises"])
def test_a_load_is_undone_with_its_request_whatever_failed(driven: Driven, fault: str) -> None:
    """The owner of a shared load is refused or cannot be computed: the other one may not go on with its pages."""
    host = driven.host_pool(4)
    prompt = [5, 6, 7, 8, POISON, 10]
    back_up(host, 0, prompt, 0)
    driven.runner.is_poisonable = True
    driven.give(admit(prompt, [7, 64] if fault == "refused" else [7, 2, 3, 4], cached=4))
    driven.give(admit([*prompt[:4], 3, 3], [7, 12, 13, 14], cached=4, request_id="q"))
    driven.give(admit(OTHER, range(30, 36), request_id="other"))
    chunks = [chunk(4, 6), chunk(4, 6, request_id="q"), chunk(0, 7, request_id="other")]
    driven.give(batch(*chunks, loads=[load(prompt, [0], [0], [7])]), batch(chunk(4, 6, request_id="q")))

    driven.run()

    assert [sorted(done.failed) for done in driven.done()] == [["q", "r"], ["q"]]
    assert driven.items("q") == []
    assert driven.tokens("other") == continuation(OTHER, 8)


def test_a_batch_of_loads_alone_is_executed(driven: Driven) -> None:
    """Nothing is computed; the pages are there afterwards."""
    host = driven.host_pool(4)
    back_up(host, 0, PROMPT, 0)
    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=4))
    number = driven.give(batch(loads=[load(PROMPT, [0], [0], [7])]))
    driven.run()
    assert [(done.plan, done.failed) for done in driven.done()] == [(number, ())]

    driven.give(batch(chunk(4, 10)))
    driven.run()

    assert driven.tokens() == continuation(PROMPT, 8)


def test_one_request_that_breaks_the_computation_fails_alone(driven: Driven) -> None:
    """The others of its step get their tokens, from a pass of their own."""
    driven.runner.is_poisonable = True
    driven.give(admit(PROMPT, range(10)), batch(chunk(0, 10)))
    driven.run(most=1)
    driven.give(admit([3, POISON, 4], range(20, 24), request_id="bad"))
    driven.give(admit(OTHER, range(30, 36), request_id="q"))
    driven.give(batch(chunk(0, 3, request_id="bad"), chunk(0, 7, request_id="q")))

    driven.run()

    assert driven.done()[-1].failed == ("bad",)
    assert driven.tokens("r") == continuation(PROMPT, 8)
    assert driven.tokens("q") == continuation(OTHER, 8)
    assert driven.tokens("bad") == []
    assert driven.executor.counters.compute_failures == 1


def test_a_request_that_always_breaks_is_ended(driven: Driven) -> None:
    """It is not planned for ever."""
    driven.runner.is_poisonable = True
    driven.give(admit([3, POISON, 4], range(20, 24)))
    for _ in range(REQUEST_FAILURES):
        driven.give(batch(chunk(0, 3)))
        driven.run()

    (finished,) = driven.finished()
    assert (finished.reason, finished.error) == ("error", "RuntimeError: out of memory")
    assert driven.items()[-1].finish == "error"


def test_a_broken_device_ends_the_worker(driven: Driven) -> None:
    """When every request of a step fails, it is not the requests."""
    driven.give(admit(PROMPT, range(10)), admit(OTHER, range(20, 26), request_id="q"))
    driven.give(batch(chunk(0, 10), chunk(0, 7, request_id="q")))
    driven.runner.is_broken = True

    with pytest.raises(InternalError, match="every request"):
        driven.run()


def test_lone_failures_in_a_row_end_the_worker_too(driven: Driven) -> None:
    """One request at a time, the device breaks them all."""
    driven.runner.is_broken = True
    for number in range(LONE_FAILURES):
        driven.give(admit(OTHER, range(20, 26), request_id=f"q{number}"), batch(chunk(0, 7, request_id=f"q{number}")))

    with pytest.raises(InternalError, match="every request"):
        driven.run()
    assert len(driven.done()) == LONE_FAILURES - 1
