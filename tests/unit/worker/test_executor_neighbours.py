"""A request computes on pages of another worker, or recomputes them: the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.messages.worker_plans import AttachNeighbour, DetachNeighbour, PageLoad
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.fake_model import continuation
from tests.unit.worker.pools import neighbour_load

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 14, 15]


@pytest.fixture
def other() -> Iterator[Driven]:
    """The neighbour, which has computed the prompt on its pages 3, 1, 8."""
    made = Driven()
    made.give(admit(PROMPT, [3, 1, 8, 9, 10]), batch(chunk(0, len(PROMPT))))
    made.run()
    assert made.tokens() == continuation(PROMPT, 8)
    yield made
    made.close()


def take_two_pages(*, incarnation: str = "inc-o") -> PageLoad:
    """The first two pages of the prompt, into pages 7 and 2."""
    return neighbour_load([3, 1], [7, 2], neighbour_id="o", neighbour_incarnation=incarnation)


def attach(other: Driven) -> AttachNeighbour:
    return AttachNeighbour(worker_id="o", worker_incarnation="inc-o", handle=other.runner.pool.handle())


def test_a_request_goes_on_from_a_neighbours_pages(driven: Driven, other: Driven) -> None:
    """Only what comes after them is computed, and every token is that of a recomputation."""
    driven.give(attach(other), admit(PROMPT, [7, 2, 5, 6, 9], cached=8), batch(chunk(8, 10), loads=[take_two_pages()]))

    driven.run()

    (done,) = driven.done()
    assert (done.failed, done.load_failures, done.loaded_tokens, done.computed_tokens) == ((), (), 8, 2)
    assert driven.tokens() == continuation(PROMPT, 8)


@pytest.mark.parametrize("case", ["never attached", "detached", "another incarnation"])
def test_a_neighbour_that_is_not_there_fails_the_load_by_name(driven: Driven, other: Driven, case: str) -> None:
    """The scheduler learns whose pages they were and plans the request again; no token is computed on nothing."""
    if case != "never attached":
        driven.give(attach(other))
    if case == "detached":
        driven.give(DetachNeighbour(worker_id="o", worker_incarnation="inc-o"))
    load = take_two_pages(incarnation="inc-p" if case == "another incarnation" else "inc-o")

    driven.give(admit(PROMPT, [7, 2, 5, 6, 9], cached=8), batch(chunk(8, 10), loads=[load]))
    driven.run()

    (done,) = driven.done()
    (failure,) = done.load_failures
    assert done.failed == ("r",)
    assert (failure.neighbour_id, failure.storage_id, failure.host_pages) == ("o", "", load.host_pages)
    assert driven.tokens() == []
    driven.give(batch(chunk(0, 10)))
    driven.run()
    assert driven.tokens() == continuation(PROMPT, 8)
