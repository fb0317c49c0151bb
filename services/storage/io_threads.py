"""Threads for blocking calls: one set for calls that requests wait for, one of low priority for all others.

``core/io_shares.py`` decides which may start. A thread cannot be stopped, and the buffer it uses must not be reused
before it ends: so ``run`` waits for the end of a call that began, and ``attempt`` for a bounded time, after which the
call is ``abandoned``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from services.storage import measures
from services.storage.abandoned import Abandoned
from services.storage.core.io_shares import IoShares
from services.storage.thread_priority import lower_priority
from shared.errors import TransportError

P = ParamSpec("P")
R = TypeVar("R")

_LANES = {True: "urgent", False: "background"}


class Hung(TransportError):
    """A call took longer than it may. It may never end."""


class IoThreads:
    """Runs a bounded number of calls at once (see ``IoShares``). Owned by the event loop."""

    def __init__(self, depth: int) -> None:
        """Make ``depth`` threads for urgent calls, and half as many, but at least one, for background calls.

        A thread starts when it is first needed; :meth:`close` lets all of them end.
        """
        self.shares: IoShares[asyncio.Future[None]] = IoShares(depth)
        self._why_given_up = ""
        self._measured = dict.fromkeys(_LANES, 0)
        self._executors = {
            True: ThreadPoolExecutor(depth, thread_name_prefix="io"),
            False: ThreadPoolExecutor(
                self.shares.background_most, thread_name_prefix="io-background", initializer=lower_priority
            ),
        }

    async def run(self, is_urgent: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` in a thread when it is its turn.

        If this is cancelled, it ends only when the call has, and the call's result or exception is dropped.
        """
        await self._turn(is_urgent)
        call = self._begin(is_urgent, lambda: function(*args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await _ended(call)
            raise

    async def attempt(
        self,
        function: Callable[[], R],
        abandoned: Abandoned,
        *,
        is_urgent: bool,
        timeout_s: float | None,
        uses: Sequence[memoryview] = (),
        on_hung: Callable[[Hung], object] = lambda hung: None,
    ) -> R:
        """Call ``function`` in a thread when it is its turn, for ``timeout_s`` seconds; None is no bound.

        If this is cancelled it ends at once. The call, if it runs then, is ``abandoned``, with the buffers that it
        ``uses``, and has the rest of its time: ``on_hung`` is called if it takes longer. Raises :class:`Hung` when it
        takes longer, and TransportError after :meth:`give_up`.
        """
        await self._turn(is_urgent)
        loop = asyncio.get_running_loop()
        call, begun_s = self._begin(is_urgent, function), loop.time()
        hung = Hung(f"no answer within {timeout_s} s")
        try:
            await asyncio.wait({call}, timeout=timeout_s)
        except asyncio.CancelledError:
            if call.done():
                _dropped(call)
            elif timeout_s is not None:
                loop.call_at(begun_s + timeout_s, lambda: call.done() or on_hung(hung))
            raise
        finally:
            if not call.done():
                abandoned.add(call, uses)
        if not call.done():
            raise hung
        if call.cancelled():  # Given up before a thread had taken it.
            raise TransportError("it was not begun")
        return call.result()

    def give_up(self, reason: str) -> None:
        """Start no more calls; waiting turns get TransportError."""
        self._why_given_up = reason
        for turn in self.shares.give_up():
            if not turn.done():
                turn.set_exception(TransportError(reason))
        self._measure()
        self.close()

    async def _turn(self, is_urgent: bool) -> None:
        if self._why_given_up:
            raise TransportError(self._why_given_up)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.shares.ask(turn, is_urgent=is_urgent)
        self._start_due()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._done(is_urgent)
            raise

    def _begin(self, is_urgent: bool, function: Callable[[], R]) -> asyncio.Future[R]:
        """Start the call; its turn ends with it, even if its caller stops waiting."""
        try:
            call = asyncio.get_running_loop().run_in_executor(self._executors[is_urgent], function)
        except RuntimeError as error:  # The executor is shut down.
            self._done(is_urgent)
            raise TransportError("no more calls are started") from error
        call.add_done_callback(lambda _: self._done(is_urgent))
        return call

    def close(self) -> None:
        """Start no more calls; those under way end by themselves."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, is_urgent: bool) -> None:
        self.shares.done(is_urgent=is_urgent)
        self._start_due()

    def _start_due(self) -> None:
        starting = True
        while starting:
            starting = False
            for is_urgent, turn in self.shares.due():
                if turn.cancelled():
                    # It is not waited for any more: the next one takes its place.
                    self.shares.done(is_urgent=is_urgent)
                    starting = True
                else:
                    turn.set_result(None)
        self._measure()

    def _measure(self) -> None:
        """Update the metric of waiting calls, of all directories together."""
        for is_urgent, lane in _LANES.items():
            waiting = self.shares.waiting(is_urgent=is_urgent)
            if waiting != self._measured[is_urgent]:
                measures.IO_WAITING.labels(lane).inc(waiting - self._measured[is_urgent])
                self._measured[is_urgent] = waiting


async def _ended(call: asyncio.Future[R]) -> None:
    """Wait for the end of a call, however often the waiting is cancelled: calls are bounded by their own time-outs."""
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            continue
    _dropped(call)


def _dropped(call: asyncio.Future[R]) -> None:
    """Retrieve the exception of a call that has ended, which its canceller does not want."""
    if not call.cancelled():
        call.exception()
