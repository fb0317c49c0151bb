"""Reconciliation of the disk with the object store: chunks that only the disk has are queued for upload.

A pass compares every chunk of the disk with the store, in order of their paths and some at a time. The first one
follows a start, for chunks that an earlier process left on the disk, or that are older than the store; another one
follows when an upload did not fit in the queue or was given up, or a directory came back. A pass that the store breaks
off continues where it was. An object of another size than the chunk counts as lacking, so that it is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from services.storage import measures
from services.storage.backends import ChunkKey
from services.storage.chunk_names import ChunkNames
from services.storage.core.tier_health import TierHealth
from services.storage.disk_tier import DiskTier
from services.storage.remote_tier import RemoteTier
from services.storage.uploads import Upload, Uploads
from shared import logs
from shared.errors import KeyMissing, ThermoclineError

AT_ONCE = 1024
"""Chunks that are compared together: about one page of a listing, where the store has no others between them."""

PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0
"""First and longest pause between two passes; doubled as long as uploads fail."""

_log = logs.get_logger("storage")


_Named = tuple[ChunkKey, ChunkKey]
"""A chunk's name at rest, and its name in the cell."""


class Reconciliation:
    """The passes of comparison. Owned by the event loop; ``run`` works until it is cancelled."""

    def __init__(
        self,
        disk: DiskTier,
        remote: RemoteTier,
        uploads: Uploads,
        names: ChunkNames,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Compare ``disk`` with ``remote``, and add what the store lacks to ``uploads``.

        This sets ``uploads.on_left_out``. ``names`` is the translation that both backends use. ``clock_s`` (seconds)
        and ``sleep`` are arguments for tests.
        """
        self.passes = 0  # Completed passes.
        self.found = 0  # Chunks that the store lacked.
        self._disk = disk
        self._remote = remote
        self._uploads = uploads
        self._names = names
        self._clock_s = clock_s
        self._sleep = sleep
        self._todo: list[list[_Named]] = []  # Groups in the store's order; the next one last.
        self._batch: dict[ChunkKey, None] = {}  # Chunks being compared.
        self._is_wanted = False
        self._changed = asyncio.Event()
        self._health = TierHealth(first_s=1.0, most_s=60.0)  # Health of the store's listings.
        self._pause = TierHealth(first_s=PAUSE_S, most_s=LONGEST_PAUSE_S)
        self._failures = 0  # Failed uploads when the last pause began.
        self._pausing: asyncio.Task[None] | None = None
        uploads.on_left_out = self._want_later

    def __len__(self) -> int:
        """Return the number of chunks still to be compared in this pass."""
        return len(self._batch) + sum(map(len, self._todo))

    def want(self) -> None:
        """Request another pass: there may be chunks that the store lacks."""
        self._is_wanted = True
        self._changed.set()

    def forget(self, namespace: str) -> None:
        """Leave a namespace ("" is all) out of this pass: it is being deleted from the store."""
        if not namespace:
            self._todo, self._batch = [], {}
        self._todo = [keys for keys in self._todo if keys[0][0].namespace != namespace]
        self._batch = {key: None for key in self._batch if key.namespace != namespace}

    async def run(self, is_listed: asyncio.Event) -> None:
        """Run requested passes until cancelled. ``is_listed`` is set once the disk knows its chunks."""
        await is_listed.wait()
        try:
            while True:
                while not self._is_wanted:
                    self._changed.clear()
                    await self._changed.wait()
                self._is_wanted = False
                await self._pass()
        finally:
            if self._pausing is not None:
                self._pausing.cancel()

    async def _pass(self) -> None:
        shapes = self._uploads.shapes
        keys = [key for shape in shapes for key in self._disk.index.keys(geometry=shape)]
        # In a thread, because going through a large index would block the event loop.
        self._todo = await asyncio.to_thread(_neighbours, keys, self._names)
        found = self.found
        while self._todo:
            batch = self._take()
            while batch:
                sizes = await self._sizes([name for name, _ in batch])
                for (_, key), nbytes in zip(batch, sizes, strict=False):
                    await self._offer(key, nbytes)
                batch = batch[len(sizes) :]
            self._batch = {}
            measures.RECONCILE_WAITING.set(len(self))
        self.passes += 1
        _log.info("store_compared", chunks=len(keys), lacking=self.found - found)

    def _take(self) -> list[_Named]:
        """Return the next chunks of one namespace and shape, in the store's order."""
        named = sorted(self._todo.pop())
        while self._todo and len(named) < AT_ONCE and _place(self._todo[-1][0][0])[:2] == _place(named[0][0])[:2]:
            named += sorted(self._todo.pop())
        self._batch = {key: None for _, key in named}
        return named

    async def _offer(self, key: ChunkKey, nbytes: int) -> None:
        """Queue a chunk for upload if the store's number of bytes for it is wrong."""
        if nbytes == self._disk.index.nbytes_of(key):
            return
        await self._uploads.room()
        # Chunks that were evicted, or dropped from the store, are not wanted any more.
        if key in self._disk and key in self._batch:
            self.found += 1
            self._uploads.add(Upload(key, self._disk.index.nbytes_of(key)))

    async def _sizes(self, names: list[ChunkKey]) -> list[int]:
        """Return the store's sizes of the first of these names at rest; retry until it answers.

        Names do not need their tenant's key, which may be gone by now.
        """
        while True:
            try:
                sizes = await self._remote.backend.sizes(names)
            except (ThermoclineError, OSError) as error:
                if self._health.failed(self._clock_s()):
                    _log.warning("store_not_compared", left=len(self), reason=str(error))
                await self._sleep(self._health.wait_s(self._clock_s()))
            else:
                self._health.worked()
                return sizes

    def _want_later(self) -> None:
        """Request another pass, but not at once: an upload was left out."""
        if self._pausing is None:
            self._pausing = asyncio.create_task(self._want_after_a_pause())

    async def _want_after_a_pause(self) -> None:
        if self._remote.upload_failures == self._failures:
            self._pause.worked()
        self._failures = self._remote.upload_failures
        self._pause.failed(self._clock_s())
        await self._sleep(self._pause.wait_s(self._clock_s()))
        self._pausing = None
        self.want()


def _place(key: ChunkKey) -> tuple[str, bytes, int]:
    """Return namespace, shape, and the directory in which it lies."""
    return key.namespace, key.geometry, key.identity[0]


def _neighbours(keys: list[ChunkKey], names: ChunkNames) -> list[list[_Named]]:
    """Return keys grouped by the directory in which they lie at rest, the last directory first.

    No sort here takes long: one would hold the interpreter from its beginning to its end. Chunks whose key is not known
    yet are left out: their namespace was not used since the start.
    """
    directories: dict[tuple[str, bytes, int], list[_Named]] = {}
    for key in keys:
        with contextlib.suppress(KeyMissing):
            name = names.at_rest(key)
            directories.setdefault(_place(name), []).append((name, key))
    return [directories[place] for place in sorted(directories, reverse=True)]
