"""Sends a workload's requests: at their own times, at a rate, or as soon as a place is free.

With a bound on requests in flight, a conversation keeps its place until its last answer; a request that is due without
a free place waits here, and its latency counts from when it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from thermocline.simulate.events import EventQueue, to_ns
from thermocline.simulate.workloads import Asked, Workload


class Source:
    """The source of a simulation: streams at most ``limit`` requests into ``send``, one ahead of time."""

    def __init__(
        self,
        workload: Workload,
        queue: EventQueue,
        send: Callable[[Asked], None],
        *,
        rate: float | None,
        in_flight: int | None,
        limit: int | None,
        seed: int,
    ) -> None:
        """``rate`` is requests a second, as a Poisson process, for those without a time of their own."""
        self._workload = workload
        self._requests: Iterator[Asked] = iter(workload.requests())
        self._queue = queue
        self._send = send
        self._rate = rate
        self._places = in_flight
        self._left = limit
        self._rng = Random(seed ^ 0x5EED)
        self._start_ns = queue.now_ns
        self._due_ns = queue.now_ns
        self._held: Asked | None = None  # A request that is due, without a place.

    def start(self) -> None:
        """Plan the first request; each later one is planned when the one before is sent."""
        self._pull()

    def answered(self, asked: Asked) -> None:
        """Plan the follow-up of a request that ended or was refused, or free its place."""
        following = self._workload.follow_up(asked) if self._left is None or self._left > 0 else None
        if following is not None:
            pause_s, then = following
            self._take_one()
            self._queue.at(self._queue.now_ns + to_ns(pause_s), self._send, then)
            return
        if self._places is not None:
            self._places += 1
        held, self._held = self._held, None
        if held is not None:
            self._arrive(held)

    def _take_one(self) -> None:
        if self._left is not None:
            self._left -= 1

    def _pull(self) -> None:
        """Plan the arrival of the workload's next request, if the limit allows."""
        asked = next(self._requests, None) if self._left is None or self._left > 0 else None
        if asked is None:
            return
        self._take_one()
        if asked.time_s is not None:
            self._due_ns = self._start_ns + to_ns(asked.time_s)
        elif self._rate is not None:
            self._due_ns += to_ns(self._rng.expovariate(self._rate))
        self._queue.at(self._due_ns, self._arrive, asked)

    def _arrive(self, asked: Asked) -> None:
        if self._places is not None:
            if self._places < 1:
                self._held = asked
                return
            self._places -= 1
        self._send(asked)
        self._pull()
