"""Answers to workers' calls for parts of a prefix's KV (``shared.messages.sparse_reads``), written into their memory.

A worker lends a piece of its memory for as long as its call is unanswered, however long it waits itself. So an answer
is sent when the last byte was written and never before, an error included. Calls for overlapping memory run one after
another in their order: a caller that lost an answer asks again, and knows by that call's answer that the first has
ended too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import xxhash

from services.storage import measures
from services.storage.lent_buffers import LentBuffers
from shared import logs
from shared.codec import decode, encode
from shared.errors import InternalError, InvalidRequest, QueueFull, ThermoclineError, Unavailable
from shared.messages.sparse_reads import ReadSparse, SparseRead

AT_ONCE = 4
"""Calls that read at a time. Each reads several chunks at once by itself; more of them only wait for the same disk."""

WAITING_MOST = 64
"""Most calls that wait for their turn. A worker has few at a time, so that more are abandoned ones."""

CALLS_MOST = AT_ONCE + WAITING_MOST + 1
"""Calls that the bus hands over at a time: one more than there is room for, so that a refusal can be sent."""

ANSWER_BYTES_MOST = 64 * 2**20
"""Most bytes of one call; it bounds the time for which the event loop computes a checksum."""

_log = logs.get_logger("storage")


class PartReading(Protocol):
    """Reads from the disk; ``services.storage.sparse`` provides it."""

    async def read(self, call: ReadSparse, into: memoryview) -> int:
        """Fill ``into``; return the bytes read from the disk. Raises ThermoclineError.

        However it ends, nothing writes to ``into`` afterwards.
        """


class SparseCalls:
    """Calls that wait or run. Owned by the event loop."""

    def __init__(
        self,
        reader: Callable[[], PartReading | None],
        shm_prefix: str,
        *,
        at_once: int = AT_ONCE,
        waiting_most: int = WAITING_MOST,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``reader`` returns None as long as there is nothing to read from."""
        self._reader = reader
        self._buffers = LentBuffers(shm_prefix)
        self._turns = asyncio.Semaphore(at_once)  # First come, first served.
        self._calls_most = at_once + waiting_most
        self._calls: dict[asyncio.Event, ReadSparse] = {}  # In order of arrival, by the event that is set at its end.
        self._clock_s = clock_s

    async def answer(self, data: bytes) -> bytes:
        """Handle one call. Every error is in the answer. If this is cancelled, there is no answer."""
        started_s = self._clock_s()
        try:
            call = decode(data, ReadSparse)
            answer = await self._read(call, started_s)
        except ThermoclineError as error:
            measures.SPARSE_FAILURES.labels(error.code).inc()
            return encode(SparseRead(error=error.message, code=error.code, seconds=self._clock_s() - started_s))
        except Exception as error:
            # A bug; but the caller must learn that nothing is written any more.
            _log.exception("sparse_read_failed")
            measures.SPARSE_FAILURES.labels(InternalError.code).inc()
            return encode(SparseRead(error=f"reading failed with {type(error).__name__}", code=InternalError.code))
        measures.SPARSE_CALLS.labels(call.part).inc()
        measures.SPARSE_BYTES.inc(call.nbytes)
        measures.SPARSE_SECONDS.observe(answer.seconds)
        return encode(answer)

    def close(self) -> None:
        """Release all memory. No call is under way."""
        self._buffers.close()

    async def _read(self, call: ReadSparse, started_s: float) -> SparseRead:
        if not 0 < call.nbytes <= ANSWER_BYTES_MOST:
            raise InvalidRequest(f"a call is for 1 to {ANSWER_BYTES_MOST} bytes, not {call.nbytes}")
        is_full = len(self._calls) >= self._calls_most
        async with self._alone(call):
            if is_full:  # Refused only now, because this answer too says that earlier calls for the memory have ended.
                raise QueueFull(f"{self._calls_most} reads of parts of chunks wait or run already")
            async with self._turns:
                reader = self._reader()
                if reader is None:
                    raise Unavailable("this storage keeps no chunks that can be read in parts")
                into = await self._buffers.memory(call.buffer, call.offset, call.nbytes)
                disk_bytes = await reader.read(call, into)
                checksum = xxhash.xxh3_64_intdigest(into)
                return SparseRead(checksum=checksum, disk_bytes=disk_bytes, seconds=self._clock_s() - started_s)

    @asynccontextmanager
    async def _alone(self, call: ReadSparse) -> AsyncIterator[None]:
        """Wait until no other call uses this memory, and hold it for the block."""
        ended = asyncio.Event()
        self._calls[ended] = call
        try:
            while (before := self._before(ended, call)) is not None:
                await before.wait()
            yield
        finally:
            del self._calls[ended]
            ended.set()

    def _before(self, mine: asyncio.Event, call: ReadSparse) -> asyncio.Event | None:
        """Return the end of an earlier call for some of the same memory, if there is one."""
        for ended, other in self._calls.items():
            if ended is mine:
                return None
            is_apart = other.offset + other.nbytes <= call.offset or call.offset + call.nbytes <= other.offset
            if other.buffer == call.buffer and not is_apart:
                return ended
        return None
