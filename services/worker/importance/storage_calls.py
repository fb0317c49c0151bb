"""Calls to storages for a part of a prefix's KV, made by threads that compute, over the bus on the event loop.

A call has two sides that may use its slot: the caller, and the storage. The caller waits for a bounded time. The
storage is done when it says so (``shared.messages.sparse_reads``), however late, or when the cell has given its
incarnation up. If its answer was lost it is asked once more, because it answers calls for the same memory one after
another.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from shared import logs, subjects
from shared.bus.protocol import Bus, Delivery
from shared.codec import decode, encode
from shared.errors import CodecError, SparsePrefixLost, ThermoclineError, Unavailable
from shared.messages.sparse_reads import ReadSparse, SparseRead
from shared.messages.status import CellStatus

LATE_S = 30.0
"""Wait for an answer before the storage is asked again; the answer is of no use by then."""

ASK_AGAIN_S = 1.0
"""Pause between calls without an answer."""

_log = logs.get_logger("worker")


class PendingRead:
    """A call in flight, whose slot the caller and the storage may use."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """Begin with both sides using the slot; the side that is done with it last calls ``ended``, once."""
        self._ended = ended
        self._answer: Future[SparseRead] = Future()
        self._lock = threading.Lock()
        self._sides = 2

    def wait(self, timeout_s: float) -> SparseRead:
        """Wait for the answer. Raises SparsePrefixLost for an error, and when there is none in time."""
        try:
            return self._answer.result(timeout_s)
        except TimeoutError as error:
            raise SparsePrefixLost(f"the storage did not answer within {timeout_s:.3f} s") from error

    def leave(self) -> None:
        """Note that one side is done with the slot."""
        with self._lock:
            self._sides -= 1
            is_last = not self._sides
        if is_last:
            self._ended()

    def answer(self, read: SparseRead) -> None:
        """Give the waiting thread an answer, on the event loop; the first of answers and failures counts."""
        if self._answer.done():
            return
        if read.error:
            self._answer.set_exception(SparsePrefixLost(f"the storage cannot read it: {read.error} ({read.code})"))
        else:
            self._answer.set_result(read)

    def fail(self, reason: str) -> None:
        """Fail the waiting thread's call, on the event loop; the first of answers and failures counts."""
        if not self._answer.done():
            self._answer.set_exception(SparsePrefixLost(reason))


class StorageCalls:
    """The event loop's side of all calls. ``begin`` is for other threads, the rest for the loop."""

    def __init__(self, bus: Bus, *, ask_again_s: float = ASK_AGAIN_S) -> None:
        """Call over ``bus``, which is not closed here, on the running event loop. Raises RuntimeError without one.

        A call without an answer for ``LATE_S`` seconds is made again after ``ask_again_s`` seconds, or as soon as the
        cell's storages change.
        """
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._ask_again_s = ask_again_s
        self._incarnations: dict[str, str] | None = None  # By storage, as the cell has last said.
        self._changed = asyncio.Event()  # Set, and replaced, when they change.
        self._under_way: dict[PendingRead, tuple[str, str]] = {}  # Storage and incarnation that each asks.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def max_payload(self) -> int:
        """Most bytes that a message of the bus may have."""
        return self._bus.max_payload

    async def see(self, delivery: Delivery) -> None:
        """Handle one message of the status subject: which storages there are."""
        try:
            status = decode(delivery.data, CellStatus)
        except CodecError:
            return  # A newer scheduler may say more than we understand.
        if status.storage_incarnations == self._incarnations:
            return
        self._incarnations = status.storage_incarnations
        for pending, asked in self._under_way.items():
            if self._is_gone(*asked):
                pending.fail(f"storage {asked[0]} is gone")
        self._changed.set()
        self._changed = asyncio.Event()

    def begin(self, storage_id: str, call: ReadSparse, ended: Callable[[], None]) -> PendingRead:
        """Ask. ``ended`` is called when the storage and the caller (:meth:`PendingRead.leave`) are done with the slot.

        Raises SparsePrefixLost when nothing was sent; the slot is then the caller's alone, and ``ended`` not called.
        """
        if self._is_closed or not self._bus.is_connected:
            raise SparsePrefixLost("the message broker is not connected")
        pending = PendingRead(ended)
        asking = self._ask(pending, storage_id, encode(call))
        try:
            asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError as error:
            asking.close()
            raise SparsePrefixLost("the worker is stopping") from error
        return pending

    async def close(self) -> None:
        """Fail what is under way. Slots that a storage has not reported as done are not given back."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, pending: PendingRead, storage_id: str, data: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        incarnation = (self._incarnations or {}).get(storage_id, "")
        self._under_way[pending] = (storage_id, incarnation)
        try:
            if self._is_closed:
                return
            answer = await self._ask_until_done(pending, storage_id, incarnation, data)
            # In this order: the slot of a thread that has its answer is free once that thread is done with it.
            pending.leave()
            if isinstance(answer, SparseRead):
                pending.answer(answer)
            else:
                pending.fail(answer)
        finally:
            pending.fail("the worker is stopping")
            del self._under_way[pending]
            self._tasks.discard(task)

    async def _ask_until_done(
        self, pending: PendingRead, storage_id: str, incarnation: str, data: bytes
    ) -> SparseRead | str:
        """Ask until the storage is done with the slot; return its answer, or why there is none."""
        while True:
            try:
                answer = await self._bus.call(subjects.rpc("storage", "sparse", storage_id), data, timeout_s=LATE_S)
                return decode(answer, SparseRead)
            except Unavailable as error:
                # Its outcome is unknown: the storage may be about to write.
                pending.fail(f"storage {storage_id} does not answer: {error.message}")
            except ThermoclineError as error:
                return error.message  # It was not sent, or answered by something that is no answer.
            _log.warning("sparse_read_unanswered", storage=storage_id)
            if not self._is_gone(storage_id, incarnation):
                await self._next_try()
            if self._is_gone(storage_id, incarnation):
                return f"storage {storage_id} is gone"

    async def _next_try(self) -> None:
        """Wait a while, or until the cell has other storages."""
        try:
            async with asyncio.timeout(self._ask_again_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _is_gone(self, storage_id: str, incarnation: str) -> bool:
        """Whether the cell has given up the incarnation that was asked; "" is one that it had not listed yet."""
        if self._incarnations is None:
            return False
        now = self._incarnations.get(storage_id)
        return now is None or incarnation not in ("", now)
