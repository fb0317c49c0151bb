"""When requests are sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

import pytest

from thermocline.simulate.events import NS_PER_S, EventQueue
from thermocline.simulate.source import Source
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked


class _Numbered:
    """Requests 0, 1, 2 …, each with ``turns`` turns, and how far it was read."""

    def __init__(self, count: int, *, turns: int = 1, times: list[float] | None = None) -> None:
        self.count, self.turns, self.times, self.read = count, turns, times, 0

    def requests(self) -> Iterator[Asked]:
        for number in range(self.count):
            self.read += 1
            time_s = self.times[number] if self.times else None
            yield Asked((Span(number, 1),), Span(-1, 1), time_s, session=self.turns - 1)

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        return (10.0, Asked(asked.spans, asked.answer, session=asked.session - 1)) if asked.session else None


class _Driven:
    """A source whose requests are each answered after a second."""

    def __init__(self, workload: _Numbered, **options: object) -> None:
        self.queue = EventQueue()
        self.sent: list[tuple[float, int]] = []
        self.most = self.now_open = 0
        settings = {"rate": None, "in_flight": None, "limit": None, "seed": 1} | options
        self.source = Source(workload, self.queue, self._send, **settings)  # type: ignore[arg-type]
        self.source.start()
        while self.queue.run_next():
            pass

    def _send(self, asked: Asked) -> None:
        self.sent.append((self.queue.now_ns / NS_PER_S, asked.spans[0].name))
        self.now_open += 1
        self.most = max(self.most, self.now_open)
        self.queue.at(self.queue.now_ns + NS_PER_S, self._answer, asked)

    def _answer(self, asked: Asked) -> None:
        self.now_open -= 1
        self.source.answered(asked)


def test_times_of_their_own_are_kept() -> None:
    """A trace's requests are sent when the trace says, however many are open."""
    driven = _Driven(_Numbered(3, times=[0.0, 0.25, 5.0]))

    assert driven.sent == [(0.0, 0), (0.25, 1), (5.0, 2)]


def test_a_closed_loop_keeps_its_places_full() -> None:
    """Four places and ten requests of a second each: four, four, two; never more than four at once."""
    driven = _Driven(_Numbered(10), in_flight=4)

    assert [time_s for time_s, _ in driven.sent] == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
    assert driven.most == 4


def test_arrivals_at_a_rate_are_poisson_and_seeded() -> None:
    """Gaps average to the inverse of the rate, and the seed decides them."""
    first, again, other = (_Driven(_Numbered(2000), rate=50.0, seed=seed).sent for seed in (1, 1, 2))
    gaps = [after - before for (before, _), (after, _) in pairwise(first)]

    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert max(gaps) > 4 / 50
    assert first == again != other


def test_a_rate_with_a_bound_holds_requests_back() -> None:
    """With two places, requests that are due too early are sent when a place is free, in order."""
    driven = _Driven(_Numbered(20), rate=1000.0, in_flight=2)

    assert driven.most == 2
    assert [number for _, number in driven.sent] == list(range(20))
    assert driven.sent[-1][0] > 8


def test_a_conversation_keeps_its_place() -> None:
    """The second conversation starts when the first had its last answer, pauses included."""
    driven = _Driven(_Numbered(2, turns=3), in_flight=1)

    assert driven.sent == [(0.0, 0), (11.0, 0), (22.0, 0), (23.0, 1), (34.0, 1), (45.0, 1)]


@pytest.mark.parametrize("options", [{"in_flight": 3}, {"rate": 10.0}])
def test_a_limit_counts_every_turn_and_the_workload_is_read_no_further(options: dict[str, object]) -> None:
    """Exactly so many requests are sent, and an endless workload is not read to its end."""
    workload = _Numbered(10**9, turns=2)
    driven = _Driven(workload, limit=25, **options)

    assert len(driven.sent) == 25
    assert workload.read <= 26
