"""Threads for calls that block: one set for what requests wait for, one of low priority for everything else.

Who may start is decided by ``core/io_shares.py``. A call that began is never abandoned: a thread cannot be stopped, and
the buffer it uses must not be given to anybody else before it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from services.storage import measures
from services.storage.core.io_shares import IoShares
from services.storage.thread_priority import lower_priority

P = ParamSpec("P")
R = TypeVar("R")

_LANES = {True: "urgent", False: "background"}


class IoThreads:
    """At most ``depth`` calls at once (see ``IoShares``). Owned by the event loop."""

    def __init__(self, depth: int) -> None:
        self.shares: IoShares[asyncio.Future[None]] = IoShares(depth)
        self._executors = {
            True: ThreadPoolExecutor(depth, thread_name_prefix="io"),
            False: ThreadPoolExecutor(
                self.shares.background_most, thread_name_prefix="io-background", initializer=lower_priority
            ),
        }

    async def run(self, is_urgent: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` in a thread when it is its turn. If this is cancelled, it ends only when the call has."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self.shares.ask(turn, is_urgent=is_urgent)
        self._start_due()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._done(is_urgent)
            raise
        try:
            call = loop.run_in_executor(self._executors[is_urgent], lambda: function(*args, **kwargs))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                await _ended(call)
                raise
        finally:
            self._done(is_urgent)

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
                    # Nobody waits for it any more: its place is the next one's.
                    self.shares.done(is_urgent=is_urgent)
                    starting = True
                else:
                    turn.set_result(None)
        for is_urgent, lane in _LANES.items():
            measures.IO_WAITING.labels(lane).set(self.shares.waiting(is_urgent=is_urgent))


async def _ended(call: asyncio.Future[R]) -> None:
    """Wait for the end of a call, however often the waiting is cancelled: calls are bounded by their own time-outs."""
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            continue
    if not call.cancelled():
        call.exception()  # Seen; whoever cancelled does not want it.
