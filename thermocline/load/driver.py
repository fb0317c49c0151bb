"""Sends a workload's requests when they are due.

Open loop: each at its time, independent of earlier ones; one that is sent late, because the client was busy or its
limit of requests in flight was reached, still counts from its due time. Closed loop: the next when one has ended.
A conversation keeps its place, through its pauses, until its last answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from thermocline.load.clock import Clock
from thermocline.load.prompts import Said
from thermocline.load.reply import TRANSPORT, Reply
from thermocline.load.talker import Prepared
from thermocline.simulate.workloads import Asked, Workload

GIVE_UP_AFTER = 20
"""The server counts as gone after so many failures in a row, all sent after the first of them had failed."""

_AHEAD_BYTES = 256 * 2**20
"""Requests are prepared before the first is sent, up to so many bytes, so that preparing delays none."""

_QUIET_S = 0.02
"""The others are prepared while no request is due for at least this time."""


class Sender(Protocol):
    """Prepares requests and sends them: the Talker, or a fake in tests."""

    def prepare(self, asked: Asked, said: Mapping[int, Said]) -> Prepared:
        """Return the request for ``asked``, whose prompt repeats the earlier answers ``said``, by span name."""
        ...

    async def send(self, prepared: Prepared, number: int, due_s: float) -> Reply:
        """Send a request and return its reply, failed ones too; latency counts from ``due_s``."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of a run.

    ``times`` are seconds from the start, one for each request that follows no other; None is a closed loop, or the
    workload's own times divided by ``time_scale``. At most ``places`` are in flight.
    """

    requests: int
    places: int
    time_scale: float = 1.0
    times: Iterator[float] | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Outcome:
    """All replies, in order of ending. ``gone_s`` is when the server stopped answering, in seconds; None if never."""

    replies: list[Reply] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    gone_s: float | None = None
    abandoned: int = 0


class _GaveUp(Exception):
    """Raised to end the task group, and all requests in flight with it."""


@dataclass(frozen=True, slots=True)
class _First:
    """A request that follows no other; ``due_s`` is from the start, None for as soon as a place is free."""

    asked: Asked
    prepared: Prepared
    due_s: float | None


class Driver:
    """The driver of one run; :meth:`run` it once."""

    def __init__(
        self, workload: Workload, sender: Sender, clock: Clock, pace: Pace, on_reply: Callable[[Reply], None]
    ) -> None:
        """Take ``workload``, which can be used only once; nothing is prepared or sent before :meth:`run`.

        Times are seconds of ``clock``. ``on_reply`` is called with every reply, failed ones too, as soon as it has
        ended.
        """
        self._workload = workload
        self._asked = workload.requests()
        self._sender = sender
        self._clock = clock
        self._pace = pace
        self._on_reply = on_reply
        self._ahead: deque[_First] = deque()
        self._ahead_bytes = 0
        self._is_all_made = False
        self._sent = 0
        self._in_flight = 0
        self._failed_since_s: float | None = None
        self._failures = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Send all requests and wait for the replies; end early when the server is gone."""
        outcome = self.outcome
        while self._has_room():
            self._make_one()
        outcome.began_s = self._clock.now_s()
        try:
            async with asyncio.TaskGroup() as group:
                await self._feed(group)
        except* _GaveUp:
            assert self._failed_since_s is not None
            outcome.gone_s = self._failed_since_s - outcome.began_s
        outcome.ended_s = self._clock.now_s()
        return outcome

    def _has_room(self) -> bool:
        """Return whether one more may be prepared ahead: at least one, whatever its size, while any is left."""
        is_wanted = not self._is_all_made and len(self._ahead) < self._pace.requests - self._sent
        return is_wanted and (not self._ahead or self._ahead_bytes < _AHEAD_BYTES)

    def _make_one(self) -> None:
        asked = next(self._asked, None)
        if asked is None:
            self._is_all_made = True
            return
        due_s = None if asked.time_s is None else asked.time_s / self._pace.time_scale
        if self._pace.times is not None:
            due_s = next(self._pace.times)
        first = _First(asked, self._sender.prepare(asked, {}), due_s)
        self._ahead.append(first)
        self._ahead_bytes += len(first.prepared.body)

    async def _next(self) -> _First | None:
        """Return the next request, after preparing as many as time allows; None when all were sent."""
        while self._has_room() and (not self._ahead or self._is_quiet(self._ahead[0])):
            self._make_one()
            # Answers that arrived meanwhile are read before the next is prepared.
            await asyncio.sleep(0)
        if not self._ahead:
            return None
        first = self._ahead.popleft()
        self._ahead_bytes -= len(first.prepared.body)
        return first

    def _is_quiet(self, first: _First) -> bool:
        return first.due_s is not None and self.outcome.began_s + first.due_s - self._clock.now_s() > _QUIET_S

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        gate = asyncio.Semaphore(self._pace.places)
        while self._is_going_on() and (first := await self._next()) is not None:
            due_s = None
            if first.due_s is not None:
                if self._pace.seconds is not None and first.due_s > self._pace.seconds:
                    return
                due_s = self.outcome.began_s + first.due_s
                await self._clock.sleep_until(due_s)
            await gate.acquire()
            if not self._is_going_on():
                return
            began_s = self._clock.now_s() if due_s is None else due_s
            group.create_task(self._converse(first, began_s, gate, self._take()))

    def _is_going_on(self) -> bool:
        """Return whether one more request may be sent."""
        seconds = self._pace.seconds
        is_over = seconds is not None and self._clock.now_s() - self.outcome.began_s > seconds
        return self._sent < self._pace.requests and not is_over

    def _take(self) -> int:
        """Count one more request as sent; return its number."""
        self._sent += 1
        return self._sent - 1

    async def _converse(self, first: _First, due_s: float, gate: asyncio.Semaphore, number: int) -> None:
        asked, prepared = first.asked, first.prepared
        said: dict[int, Said] = {}
        try:
            while True:
                reply = await self._ask(prepared, number, due_s)
                following = None if reply.error or not self._is_going_on() else self._workload.follow_up(asked)
                if following is None:
                    return
                number = self._take()
                said[asked.answer.name] = reply.said
                pause_s, asked = following
                due_s = reply.ended_s + pause_s / self._pace.time_scale
                prepared = self._sender.prepare(asked, said)
                await self._clock.sleep_until(due_s)
        finally:
            gate.release()

    async def _ask(self, prepared: Prepared, number: int, due_s: float) -> Reply:
        began_s = self._clock.now_s()
        reply = None
        try:
            reply = await self._sender.send(prepared, number, due_s)
        finally:
            # Requests in flight when the server was given up have no reply.
            self.outcome.abandoned += reply is None
        self.outcome.replies.append(reply)
        self._on_reply(reply)
        self._judge(reply, began_s)
        return reply

    def _judge(self, reply: Reply, began_s: float) -> None:
        """Raise _GaveUp after GIVE_UP_AFTER failures in a row."""
        if reply.error not in TRANSPORT:
            self._failed_since_s, self._failures = None, 0
            return
        if self._failed_since_s is None:
            self._failed_since_s = reply.ended_s
        # Failures of requests that were in flight when the server died do not count.
        self._failures += began_s >= self._failed_since_s
        if self._failures >= GIVE_UP_AFTER:
            raise _GaveUp
