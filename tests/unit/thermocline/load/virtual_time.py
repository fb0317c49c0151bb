"""A clock whose time passes only when everybody waits for it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")

_TURNS_OF_THE_LOOP = 50
"""A chain of wake-ups at one moment is shorter; a driver that sends one request after another may go on for longer."""

_MOST_ROUNDS = 1000


class VirtualTime:
    """Implements ``thermocline.load.clock.Clock``."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._asked = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self._now_s

    def pass_now(self, seconds: float) -> None:
        """Time in which the loop itself stood still."""
        self._now_s += seconds

    async def sleep_until(self, time_s: float) -> None:
        if time_s <= self._now_s:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (time_s, self._asked, future))
        self._asked += 1
        await future

    async def run(self, work: Awaitable[_T]) -> _T:
        """Let time pass until ``work`` is done. Raises AssertionError when it waits for nothing that can come."""
        task = asyncio.ensure_future(work)
        rounds = 0
        while True:
            for _ in range(_TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            if not self._waiting:
                rounds += 1
                assert rounds < _MOST_ROUNDS, "everybody waits, and nobody for the clock"
                continue
            time_s, _, future = heapq.heappop(self._waiting)
            self._now_s = max(self._now_s, time_s)
            if not future.done():
                future.set_result(None)
