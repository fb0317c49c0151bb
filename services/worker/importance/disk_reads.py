"""Reads of parts of prefixes through storages: a slot, a call, a verified copy, again and again. One for each worker.

A read that takes several calls keeps two under way, so that one is copied while the next is read. A thread that holds a
slot never waits for another: two reads that each hold what the other waits for would wait until both give up.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import torch

from services.worker.importance.landing import Landing
from services.worker.importance.read_buffers import ReadBuffers, ReadSlot
from services.worker.importance.storage_calls import PendingRead, StorageCalls
from shared.bus.protocol import Delivery
from shared.errors import ConfigError, SparsePrefixLost, TransportError
from shared.importance import PROBE_HEADS
from shared.messages.pools import KvGeometry
from shared.messages.sparse_reads import MOST_LAYERS, ReadSparse, code_bytes

CALLS_AT_ONCE = 2

AHEAD_MOST = 8
"""Reads ahead of demand that wait or run: about as many requests as one step has. More would come too late."""


@dataclass(frozen=True, slots=True)
class PartsRead:
    """One uint8 tensor on the device for each call; ``disk_bytes`` were read from the disk for them."""

    parts: list[torch.Tensor]
    disk_bytes: int


class DiskReads:
    """Used by several threads, but not by the event loop's. Its maker closes it."""

    def __init__(
        self,
        buffers: ReadBuffers,
        calls: StorageCalls,
        geometry: KvGeometry,
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        """``timeout_s`` is the longest wait for one read. ``geometry`` is the device pool's.

        Raises ConfigError when a slot has no room for what one call reads of a token: K and V in one layer, or codes in
        several.
        """
        codes = MOST_LAYERS * min(PROBE_HEADS, geometry.kv_heads) * code_bytes(geometry.head_dim)
        token_bytes = max(geometry.token_bytes // geometry.layers, codes)
        if buffers.slot_bytes < token_bytes:
            raise ConfigError(
                f"--sparse-buffer-bytes: a slot has {buffers.slot_bytes} bytes, a token in one call {token_bytes}"
            )
        self.geometry, self.device = geometry, device
        self.slot_bytes = buffers.slot_bytes
        self._buffers, self._calls = buffers, calls
        self._timeout_s = timeout_s
        self._landing = Landing(device, buffers.slot_bytes)
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead-keys")
        self._ahead = threading.BoundedSemaphore(AHEAD_MOST)

    @property
    def call_bytes(self) -> int:
        """What an encoded call may have: half of a message, so that there is room for whatever surrounds it."""
        return self._calls.max_payload // 2

    def read(self, storage_id: str, calls: Sequence[ReadSparse]) -> PartsRead:
        """Return what ``calls`` ask for, verified; its destination is filled in here. Each fits in a slot.

        Raises SparsePrefixLost.
        """
        until_s = time.monotonic() + self._timeout_s
        under_way: deque[tuple[PendingRead, ReadSlot, int]] = deque()
        read = PartsRead([], 0)
        try:
            for call in calls:
                if len(under_way) == CALLS_AT_ONCE:
                    read = self._land(under_way, read, until_s)
                slot = self._buffers.take_at_once()
                while slot is None and under_way:
                    read = self._land(under_way, read, until_s)
                    slot = self._buffers.take_at_once()
                if slot is None:
                    slot = self._buffers.take(self._left_s(until_s))
                under_way.append((self._begin(storage_id, call, slot), slot, call.nbytes))
            while under_way:
                read = self._land(under_way, read, until_s)
        except TransportError as error:
            raise SparsePrefixLost(error.message) from error
        finally:
            for pending, _, _ in under_way:
                pending.leave()
        return read

    def ahead(self, work: Callable[[], torch.Tensor]) -> Future[torch.Tensor] | None:
        """Run ``work`` on the thread that reads ahead; None while it has enough to do."""
        if not self._ahead.acquire(blocking=False):
            return None
        try:
            begun = self._threads.submit(work)
        except RuntimeError:  # The worker is stopping.
            self._ahead.release()
            return None
        begun.add_done_callback(lambda _: self._ahead.release())
        return begun

    def wait(self, begun: Future[torch.Tensor]) -> torch.Tensor:
        """Wait for what :meth:`ahead` began. Raises SparsePrefixLost when it failed or does not end in time."""
        try:
            return begun.result(self._timeout_s)
        except TimeoutError as error:
            raise SparsePrefixLost("keys that are being read ahead did not come in time") from error

    async def see(self, delivery: Delivery) -> None:
        """Handle one message of the status subject, on the event loop."""
        await self._calls.see(delivery)

    async def close(self) -> None:
        """Fail what is under way, end the thread, and let go of the memory. For the event loop."""
        await self._calls.close()
        self._buffers.close()  # The thread may be waiting for a slot, and those of silent storages do not come back.
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _begin(self, storage_id: str, call: ReadSparse, slot: ReadSlot) -> PendingRead:
        placed = msgspec.structs.replace(call, buffer=slot.buffer, offset=slot.offset)
        try:
            return self._calls.begin(storage_id, placed, lambda: self._buffers.give_back(slot))
        except SparsePrefixLost:
            self._buffers.give_back(slot)
            raise

    def _land(self, under_way: deque[tuple[PendingRead, ReadSlot, int]], read: PartsRead, until_s: float) -> PartsRead:
        """Wait for the call that was begun first, and copy what it brought."""
        pending, slot, nbytes = under_way.popleft()
        try:
            answer = pending.wait(self._left_s(until_s))
            part = self._landing.land(slot.memory[:nbytes], answer.checksum)
        finally:
            pending.leave()
        return PartsRead([*read.parts, part], read.disk_bytes + answer.disk_bytes)

    def _left_s(self, until_s: float) -> float:
        return max(0.0, until_s - time.monotonic())
