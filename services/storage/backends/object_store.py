"""The remote tier: chunks in an object store, or in a directory that nodes share.

Chunks are named by their contents, so nodes that write one name write the same chunk. A write is conditional
("create"): the first writer's blob stays and the others learn that it is there. A store without conditional writes is
asked first instead, and of two that write at the same moment the last one writes the same chunk over the first.

Every answer is within the time that the caller gave; a chunk found to be absent is not asked for again for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError

from services.storage import measures
from services.storage.backends import FRONT_BYTES, REMOTE_WIDTH, ChunkEntry, ChunkKey, IsStale, RemoteBackend, Stored
from services.storage.backends.guarded_calls import Answer, GuardedCalls
from services.storage.backends.listing import Listing
from services.storage.backends.remote_location import RemoteLocation, parse_remote
from services.storage.backends.remote_stores import connect
from services.storage.backends.store_calls import StoreCalls
from services.storage.backends.store_errors import (
    is_empty,
    is_full,
    is_missing,
    is_there_already,
    lacks_conditional_writes,
)
from services.storage.chunk_names import ChunkNames
from services.storage.config import StorageConfig
from services.storage.core.absence import AbsenceCache
from shared import logs
from shared.errors import IntegrityError, InvalidRequest

if TYPE_CHECKING:
    from obstore import Bytes

ABSENCE_S = 10.0
ABSENT_CHUNKS = 16_384
HEADS_AT_ONCE = 16
"""Blobs whose size is asked for at once, so that connections are left to fetches."""
PROBE_NAME = "thermocline-probe"

_log = logs.get_logger("storage")


def open_remote(
    config: StorageConfig, *, environ: Mapping[str, str] | None = None, names: ChunkNames | None = None
) -> RemoteBackend | None:
    """Return the remote tier that ``config.remote`` names, or None. Sends no request to the store yet.

    Raises ConfigError.
    """
    if not config.remote:
        return None
    location = parse_remote(config.remote)
    timeout_s = config.remote_timeout_ms / 1000
    store = connect(location, timeout_s=timeout_s, environ=os.environ if environ is None else environ)
    calls = GuardedCalls(str(location), timeout_s=timeout_s, slots=REMOTE_WIDTH)
    return ObjectStoreBackend(location, StoreCalls(location, store), calls, names=names)


class ObjectStoreBackend:
    """A ``RemoteBackend`` over one object store; :mod:`services.storage.backends` has the properties of its calls."""

    name = "remote"

    def __init__(
        self,
        location: RemoteLocation,
        store: StoreCalls,
        calls: GuardedCalls,
        *,
        clock: Callable[[], float] = time.monotonic,
        names: ChunkNames | None = None,
    ) -> None:
        """Send the requests of ``store`` through ``calls``, which :meth:`close` closes; none is sent yet.

        ``names`` translates to names at rest; None leaves names as they are, for chunks that are not sealed. ``clock``
        (seconds) times the notes of absent chunks.
        """
        self.location = location
        self._names = names or ChunkNames()
        self._store = store
        self._calls = calls
        self._clock = clock
        self._writes_conditionally = True
        self._absence = AbsenceCache(max_chunks=ABSENT_CHUNKS, lifetime_s=ABSENCE_S)

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        """Read a whole blob; if it has more than ``most`` bytes, only as much is read as shows that."""
        if self._absence.is_absent(key, self._clock()):
            measures.REMOTE_REQUESTS.labels("get", "known_missing").inc()
            return None
        asked_s, path = self._clock(), self._names.at_rest(key).path
        body = await self._calls.ask("get", lambda: self._get(path, most), timeout_s=timeout_s)
        if body is None:
            self._absence.note(key, asked_s=asked_s, now_s=self._clock())
            return None
        measures.REMOTE_BYTES.labels("down").inc(len(body))
        if len(body) > most:
            raise IntegrityError(f"{path} has more than {most} bytes in {self.location}")
        return memoryview(body)

    async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
        """Keep a blob, replacing an object that is not this chunk."""
        attempt = partial(self._store_whole, self._names.at_rest(key).path, blob, is_stale)
        stored = await self._calls.ask("put", attempt, timeout_s=timeout_s)
        self._absence.forget(key, self._clock())
        if stored != "there":
            measures.REMOTE_BYTES.labels("up").inc(len(blob))
        return stored

    async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the bytes of the first of these blobs, which are in the order of their names at rest.

        Where the store lists in order, a listing has all of them, and also objects of others between the first and the
        last. Else ``HEADS_AT_ONCE`` are asked for, each with the store's whole time.
        """
        if not keys:
            return []
        if self.location.lists_in_order:
            return await self._listed_sizes([self._names.at_rest(key).path for key in keys])
        paths = [self._names.at_rest(key).path for key in keys[:HEADS_AT_ONCE]]
        asked = [
            asyncio.create_task(self._calls.ask("head", partial(self._head, path), timeout_s=self._calls.timeout_s))
            for path in paths
        ]
        try:
            return await asyncio.gather(*asked)
        finally:
            for head in asked:
                head.cancel()  # One that failed ends the others.

    async def remove(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> None:
        """Delete blobs, in as few requests as the store's protocol needs."""
        paths = [self._names.at_rest(key).path for key in keys]
        await self._calls.ask("delete", lambda: self._remove(paths), timeout_s=timeout_s)

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """Yield the chunks of a namespace, page by page; objects of other names are skipped.

        Each page has the store's time-out. Raises TransportError when a page cannot be read.
        """
        prefix = f"{namespace}/" if namespace else ""
        listing = Listing(self._store, prefix, self.location.lists_in_order)
        while page := self._calls.call("list", listing.next_page, timeout_s=self._calls.timeout_s):
            for meta in page:
                try:
                    key = ChunkKey.parse(meta["path"])
                except InvalidRequest:
                    continue
                yield ChunkEntry(self._names.in_cell(key), meta["size"])

    @property
    def fault(self) -> str:
        """Why the store counts as unreachable or full; "" while it answers and takes objects."""
        return self._calls.fault

    def probe(self) -> None:
        """Ask for an object that is never there, if the breaker lets this call through. Blocking.

        Raises TransportError when the store does not answer, or its bucket is missing.
        """
        self._calls.call("probe", lambda: self._get(PROBE_NAME, 0), timeout_s=self._calls.timeout_s)

    def close(self) -> None:
        """Refuse new calls and wait for those that block (``GuardedCalls.close``)."""
        self._calls.close()

    async def _store_whole(self, path: str, body: bytes, is_stale: IsStale) -> Answer[Stored]:
        if (await self._put(path, body)).value:
            return Answer("ok", "new")
        nbytes = (await self._head(path)).value
        if nbytes == len(body):
            # One byte more than the most is read, and nothing where it was deleted meanwhile.
            front = (await self._get(path, FRONT_BYTES - 1)).value
            if not is_stale(nbytes, bytes(front or b"")):
                return Answer("exists", "there")
        await self._store.put(path, body, "overwrite")
        return Answer("replaced", "replaced")

    async def _listed_sizes(self, paths: list[str]) -> list[int]:
        wanted = dict.fromkeys(paths, 0)
        # A listing begins behind a name: behind one that is less than the first, and shares all of its directory.
        listing = Listing(self._store, paths[0].rsplit("/", 2)[0] + "/", is_in_order=True, after=paths[0][:-1])
        while page := await self._calls.ask("list", listing.next_page, timeout_s=self._calls.timeout_s):
            for meta in page:
                if meta["path"] in wanted:
                    wanted[meta["path"]] = meta["size"]
            if page[-1]["path"] >= paths[-1]:
                break
        return list(wanted.values())

    async def _remove(self, paths: list[str]) -> Answer[None]:
        try:
            await self._store.delete_all(paths)
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
            # Some stores report a missing object as a failure of all.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    await self._store.delete(path)
        return Answer("ok", None)

    async def _put(self, path: str, body: bytes) -> Answer[bool]:
        try:
            return await self._create(path, body)
        except (BaseError, OSError) as error:
            # A store without room for a blob may have this very one already.
            if is_full(error) and (await self._head(path)).value:
                return Answer("exists", False)
            raise

    async def _create(self, path: str, body: bytes) -> Answer[bool]:
        if self._writes_conditionally:
            try:
                await self._store.put(path, body, "create")
            except (BaseError, NotImplementedError) as error:
                if is_there_already(error):
                    return Answer("exists", False)
                if not lacks_conditional_writes(error):
                    raise
                self._writes_conditionally = False
                _log.warning("remote_without_conditional_writes", store=str(self.location))
            else:
                return Answer("ok", True)
        if (await self._head(path)).value:
            return Answer("exists", False)
        await self._store.put(path, body, "overwrite")
        return Answer("ok", True)

    async def _get(self, path: str, most: int) -> Answer[Bytes | bytes | None]:
        try:
            body = await self._store.get(path, most)
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
            return Answer("missing", None)
        except BaseError as error:
            if not is_empty(error):
                raise
            return Answer("ok", b"")
        return Answer("too_large" if len(body) > most else "ok", body)

    async def _head(self, path: str) -> Answer[int]:
        """Return the bytes of an object; 0 if there is none. An empty one was not written here and counts as none."""
        try:
            return Answer("ok", await self._store.head(path))
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
            return Answer("missing", 0)
