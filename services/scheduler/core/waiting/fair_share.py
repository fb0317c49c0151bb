"""The ready order of one worker's waiting requests: by priority, then by fair share, then by arrival.

Within one priority the tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996), counted in
tokens served: each tenant has a lane with a tag, the lane with the least tag is served next, and tokens served raise
its tag. A tenant that returns starts at the tag of the lane that was served last, so it neither waits
behind another's thousand requests nor makes up for the time in which it asked for nothing. Within a lane, requests
that come back from a deferral stand at the front and the others in order of arrival; with one tenant, or without
fair sharing, the front of the lane is the front of the queue.

No operation touches more than one lane: lists are sorted by plain tuples, which a bisection compares in C.

Beside the order is an index by the first page of tokens (``Worker.openings``), so that a batch that has begun to
load a prefix finds the requests that reuse it without a scan of the whole queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from shared.errors import InvariantViolated
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker


Entry = tuple[int, int, str]
"""A waiting request: (0 after a deferral, otherwise 1; its place in arrival order; its id)."""

_IDLE_TENANTS = 1024
"""Tenants at most without a waiting request whose tag is remembered. One with an old tag needs none."""


class Lane(msgspec.Struct):
    """The waiting requests of one tenant at one priority. ``tag`` counts tokens (a virtual time)."""

    tag: int
    waiting: list[Entry] = []  # Sorted.


class Level(msgspec.Struct):
    """All lanes of one priority. ``now`` is the tag that the lane served last had: the level's virtual time."""

    now: int = 0
    lanes: dict[str, Lane] = {}
    order: list[tuple[int, int, int, str]] = []  # Each lane's (tag, *head without its id, tenant), sorted.
    idle: dict[str, int] = {}  # Tags ahead of ``now`` of tenants that wait for nothing.


class Queue(msgspec.Struct):
    """Requests that wait at one worker and are ready to run, by priority. A priority without requests is dropped."""

    levels: dict[int, Level] = {}
    size: int = 0

    def add(self, priority: int, tenant: str, entry: Entry) -> None:
        """Add a request to its tenant's lane."""
        level = self.levels.get(priority)
        if level is None:
            level = self.levels[priority] = Level()
        self.size += 1
        lane = level.lanes.get(tenant)
        if lane is None:
            lane = Lane(max(level.now, level.idle.pop(tenant, 0)), [entry])
            level.lanes[tenant] = lane
            insort(level.order, _place(lane, tenant))
            return
        if entry > lane.waiting[0]:
            insort(lane.waiting, entry)
            return
        before = _place(lane, tenant)
        lane.waiting.insert(0, entry)
        _move(level, before, _place(lane, tenant))

    def remove(self, priority: int, tenant: str, entry: Entry) -> None:
        """Remove a request. Raises InvariantViolated when it is not in this lane."""
        level = self.levels.get(priority)
        lane = None if level is None else level.lanes.get(tenant)
        index = 0 if lane is None else bisect_left(lane.waiting, entry)
        if level is None or lane is None or index == len(lane.waiting) or lane.waiting[index] != entry:
            raise InvariantViolated(f"request {entry[2]} is not in the queue that it waits in")
        self.size -= 1
        if index:
            del lane.waiting[index]
            return
        before = _place(lane, tenant)
        del lane.waiting[0]
        if lane.waiting:
            _move(level, before, _place(lane, tenant))
            return
        del level.order[_index(level, before)]
        del level.lanes[tenant]
        if not level.lanes:
            del self.levels[priority]
        elif lane.tag > level.now:
            _remember(level, tenant, lane.tag)

    def charge(self, priority: int, tenant: str, tokens: int, *, is_start: bool) -> None:
        """Charge a tenant for ``tokens``. ``is_start``: one of its waiting requests is about to be admitted.

        Where no request waits there is nothing to share, and nothing is recorded.
        """
        level = self.levels.get(priority)
        if level is None:
            return
        lane = level.lanes.get(tenant)
        if lane is None:
            _remember(level, tenant, max(level.now, level.idle.get(tenant, 0)) + tokens)
            return
        if is_start:
            level.now = max(level.now, lane.tag)
        before = _place(lane, tenant)
        lane.tag += tokens
        _move(level, before, _place(lane, tenant))

    def window(self, limit: int, cost_of: Callable[[str], int]) -> list[str]:
        """Return the first ``limit`` ids in the order of service, with ``cost_of`` tokens charged for each."""
        names: list[str] = []
        for priority in sorted(self.levels, reverse=True):
            level = self.levels[priority]
            if len(level.lanes) == 1:
                for lane in level.lanes.values():
                    names += [entry[2] for entry in lane.waiting[: limit - len(names)]]
            else:
                _interleave(level, limit, cost_of, names)
            if len(names) >= limit:
                break
        return names


def _interleave(level: Level, limit: int, cost_of: Callable[[str], int], names: list[str]) -> None:
    """Append the ids that the lanes would serve in turn. Looks at no more lanes than it takes requests."""
    upcoming: list[tuple[int, int, int, str, int]] = []  # A heap of lanes that were served already.
    unserved = 0
    order = level.order
    while len(names) < limit:
        if unserved < len(order) and (not upcoming or order[unserved] <= upcoming[0][:4]):
            tag, _, _, tenant = order[unserved]
            position = 0
            unserved += 1
        elif upcoming:
            tag, _, _, tenant, position = heappop(upcoming)
        else:
            return
        waiting = level.lanes[tenant].waiting
        name = waiting[position][2]
        names.append(name)
        position += 1
        if position < len(waiting):
            heappush(upcoming, (tag + cost_of(name), *waiting[position][:2], tenant, position))


def _place(lane: Lane, tenant: str) -> tuple[int, int, int, str]:
    rank, arrival, _ = lane.waiting[0]
    return (lane.tag, rank, arrival, tenant)


def _index(level: Level, place: tuple[int, int, int, str]) -> int:
    index = bisect_left(level.order, place)
    if index == len(level.order) or level.order[index] != place:
        raise InvariantViolated(f"the lane of tenant {place[3]!r} is not in order")
    return index


def _move(level: Level, before: tuple[int, int, int, str], after: tuple[int, int, int, str]) -> None:
    del level.order[_index(level, before)]
    insort(level.order, after)


def _remember(level: Level, tenant: str, tag: int) -> None:
    level.idle[tenant] = tag
    if len(level.idle) <= _IDLE_TENANTS:
        return
    level.idle = {known: its for known, its in level.idle.items() if its > level.now}
    if len(level.idle) > _IDLE_TENANTS:
        del level.idle[next(iter(level.idle))]


def stand_in_line(worker: Worker, request: Request) -> None:
    """Add a waiting request to the ready order of its worker, and to the index by first page."""
    worker.line.queue.add(request.submit.priority, request.place.lane, _entry(request))
    opening = _opening(worker, request)
    alike = worker.line.openings.get(opening)
    if alike is not None:
        alike[request.request_id] = None
    elif opening:
        worker.line.openings[opening] = {request.request_id: None}


def step_out(worker: Worker, request: Request) -> None:
    """Take a ready request out of the order and the index."""
    worker.line.queue.remove(request.submit.priority, request.place.lane, _entry(request))
    opening = _opening(worker, request)
    if opening:
        alike = worker.line.openings[opening]
        del alike[request.request_id]
        if not alike:
            del worker.line.openings[opening]


def serve(worker: Worker, request: Request, tokens: int) -> None:
    """Take a request that is admitted out of the order, and charge its tenant for ``tokens`` to compute."""
    worker.line.queue.charge(request.submit.priority, request.place.lane, tokens, is_start=True)
    step_out(worker, request)


def charge_output(worker: Worker, request: Request, tokens: int) -> None:
    """Charge a tenant for output tokens of a request that leaves its worker."""
    worker.line.queue.charge(request.submit.priority, request.place.lane, tokens, is_start=False)


def first_in_line(state: CellState, worker: Worker, limit: int) -> list[str]:
    """Return the ids of the requests that would be served next, at most ``limit``. Changes nothing."""
    requests = state.requests
    return worker.line.queue.window(limit, lambda name: requests[name].place.uncached)


def opened_by(worker: Worker, first_pages: Iterable[bytes]) -> dict[str, None]:
    """Return the ids of ready requests whose tokens begin with one of these pages, unordered. Changes nothing."""
    found: dict[str, None] = {}
    for page in first_pages:
        found |= worker.line.openings.get(page, {})
    return found


def waiting_at(worker: Worker) -> list[str]:
    """Return the ids of all requests that wait at a worker, deferred ones first. Changes nothing."""
    names = list(worker.line.deferred)
    for level in worker.line.queue.levels.values():
        for lane in level.lanes.values():
            names += [entry[2] for entry in lane.waiting]
    return names


def _opening(worker: Worker, request: Request) -> bytes:
    """Return the first page of a request's tokens; b"" where it has none or reuses nothing. Constant while it waits."""
    if not request.may_reuse:
        return b""
    size = worker.handle.geometry.page_size * TOKEN_BYTES
    prompt = request.submit.prompt
    first = prompt[:size] if len(prompt) >= size else request.tokens[:size]
    return first if len(first) == size else b""


def _entry(request: Request) -> Entry:
    return (0 if request.place.is_returned else 1, request.accepted_seq, request.request_id)


class Line(msgspec.Struct):
    """The requests that wait at a worker."""

    queue: Queue = msgspec.field(default_factory=Queue)  # Waiting requests that are ready to run.
    openings: dict[bytes, dict[str, None]] = {}  # Ready requests that may reuse a prefix, by their first page.
    deferred: dict[str, int] = {}  # Deferred requests; the tokens that their producer must have computed.
    load_waiters: dict[int, dict[str, int]] = {}  # Deferred requests that wait for a load, by node.
    cost: int = 0  # Microseconds of all waiting requests, deferred ones included.
