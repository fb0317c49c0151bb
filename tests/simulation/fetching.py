"""A FetchChunks that a simulated storage is carrying out: a chunk at a time, disk first, until one is nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.chunks import chunk_names, chunk_pages
from shared.messages import storage_events, storage_plans
from shared.messages.base import unpack_int32
from shared.messages.pools import HIDDEN
from tests.simulation.contents import Copy, require

if TYPE_CHECKING:
    from tests.simulation.storage_process import StorageProcess

CHUNK_US = 400
CHUNK_BYTES = 512


class Fetching:
    """``done`` chunks are in the pool."""

    def __init__(self, storage: StorageProcess, order: storage_plans.FetchChunks) -> None:
        self.storage = storage
        self.order = order
        self.done = 0
        self.is_cancelled = False
        rate = storage.cell.scenario.shape.disk_bytes_per_s
        self._chunk_us = CHUNK_BYTES * 1_000_000 // rate if rate else CHUNK_US
        self._each = chunk_pages(storage.cell.scenario.shape.page_size)
        self._names = chunk_names(order.identities, self._each)
        self._from_disk = self._from_remote = 0
        self._missing: list[bytes] = []
        self._begun_ns = storage.cell.clock.now_ns

    def start(self) -> None:
        """Bring the first chunk after a while."""
        storage = self.storage
        stalled_us = max(0, storage.stalled_to_ns - storage.cell.clock.now_ns) / 1_000
        storage.later(storage.chance.randint(self._chunk_us // 2, self._chunk_us * 2) + stalled_us, self._next)

    def _next(self) -> None:
        now_ns = self.storage.cell.clock.now_ns
        is_late = now_ns - self._begun_ns > self.order.deadline_ms * 1_000_000
        error = ""
        if self.storage.chance.random() < self.storage.cell.scenario.rates.bad_fetches:
            error = "made to fail"
        goes_on = not (error or is_late or self.is_cancelled) and self._bring()
        if not goes_on:
            self._say(error, is_over=True)
            del self.storage.fetches[self.order.fetch_id]
            return
        if self.storage.chance.random() < 0.3:
            self._say("", is_over=False)
        self.start()

    def _bring(self) -> bool:
        """Bring a chunk; returns whether there is more to bring."""
        storage, order = self.storage, self.order
        if self.done == len(self._names):
            return False
        name = self._names[self.done]
        pool = storage.hidden_pool if order.form == HIDDEN else storage.pool
        require(pool is not None, "a fetch to a pool that is not there")
        assert pool is not None
        copies = storage.disk.form(order.form).find(name)
        if copies is None:
            self._missing.append(name)
            remote = storage.cell.remote.form(order.form)
            may_ask = storage.cell.scenario.shape.has_remote and not storage.cell.is_remote_away
            copies = remote.find(name) if may_ask else None
            if copies is None:
                return False
            self._from_remote += 1
        else:
            self._from_disk += 1
        start = self.done * self._each
        places = unpack_int32(order.host_pages)[start : start + self._each]
        for place, copy in zip(places, copies, strict=True):
            if place >= 0:
                pool.memory[place] = Copy(copy.claimed, copy.page)
        self.done += 1
        return self.done < len(self._names)

    def _say(self, error: str, *, is_over: bool) -> None:
        self.storage.tell(
            storage_events.ChunksFetched,
            fetch_id=self.order.fetch_id,
            chunks=self.done,
            is_over=is_over,
            disk_chunks=self._from_disk,
            remote_chunks=self._from_remote,
            missing=b"".join(self._missing),
            error=error,
            nbytes=CHUNK_BYTES * self.done,
            seconds=self._chunk_us * self.done / 1e6,
        )
        if self.order.form == "kv":
            self.storage.forget_parts(self._missing)
