"""The remote tier: chunks in an object store, or in a directory that nodes share.

Chunks are named by their contents, so nodes that write one name write the same chunk. A write is conditional
("create"): the first writer's blob stays and the others learn that it is there. A store without conditional writes is
asked first instead, and of two that write at the same moment the last one writes the same chunk over the first.

Every answer is within the time that the caller gave; what was found to be absent is not asked again for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
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
PROBE_NAME = "thermocline-probe"

_log = logs.get_logger("storage")


def open_remote(
    config: StorageConfig, *, environ: Mapping[str, str] | None = None, names: ChunkNames | None = None
) -> RemoteBackend | None:
    """Return the remote tier that ``config.remote`` names, or None. Raises ConfigError; sends no request to the store
    yet.
    """
    if not config.remote:
        return None
    location = parse_remote(config.remote)
    timeout_s = config.remote_timeout_ms / 1000
    store = connect(location, timeout_s=timeout_s, environ=os.environ if environ is None else environ)
    calls = GuardedCalls(str(location), timeout_s=timeout_s, slots=REMOTE_WIDTH)
    return ObjectStoreBackend(location, StoreCalls(location, store), calls, names=names)


class ObjectStoreBackend:
    """A ``RemoteBackend`` over one object store; see :mod:`services.storage.backends` for what its calls promise."""

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
        self.location = location
        self._names = names or ChunkNames()
        self._store = store
        self._calls = calls
        self._clock = clock
        self._writes_conditionally = True
        self._absence = AbsenceCache(max_chunks=ABSENT_CHUNKS, lifetime_s=ABSENCE_S)
        self._absence_lock = threading.Lock()

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        """Keep a blob; ``stripe`` means nothing to a store of one place."""
        # A copy, because a write that was given up may still be read from when the caller uses its buffer again.
        body = bytes(blob)
        path = self._names.at_rest(key).path
        is_new = self._calls.call("put", lambda: self._put(path, body), timeout_s=timeout_s)
        with self._absence_lock:
            self._absence.forget(key, self._clock())
        if is_new:
            measures.REMOTE_BYTES.labels("up").inc(len(body))
        return is_new

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """Read a whole blob; of one that is larger than ``into`` no more is read than shows that it is."""
        if self._is_known_absent(key):
            return 0
        asked_s, path = self._clock(), self._names.at_rest(key).path
        body = self._calls.call("get", lambda: self._get(path, len(into)), timeout_s=timeout_s)
        found = self._checked(key, len(into), body, asked_s)
        if found is None:
            return 0
        # Copied here and not as it arrives: only the caller's own thread may touch the caller's buffer, and only
        # until this call returns.
        into[: found.nbytes] = found
        return found.nbytes

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        """Read a whole blob; of one that has more than ``most`` bytes no more is read than shows that it has."""
        if self._is_known_absent(key):
            return None
        asked_s, path = self._clock(), self._names.at_rest(key).path
        body = await self._calls.ask("get", lambda: self._get(path, most), timeout_s=timeout_s)
        return self._checked(key, most, body, asked_s)

    async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
        """Keep a blob, in the place of what is not this chunk."""
        attempt = partial(self._store_whole, self._names.at_rest(key).path, blob, is_stale)
        stored = await self._calls.ask("put", attempt, timeout_s=timeout_s)
        with self._absence_lock:
            self._absence.forget(key, self._clock())
        if stored != "there":
            measures.REMOTE_BYTES.labels("up").inc(len(blob))
        return stored

    async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Bytes of each of these blobs, which are in the order of their names at rest: from a listing where the store
        lists in order, else asked one by one.

        A listing also names what others keep between the first and the last of them.
        """
        if not keys:
            return []
        paths = [self._names.at_rest(key).path for key in keys]
        if self.location.lists_in_order:
            return await self._listed_sizes(paths)
        asked = (self._calls.ask("head", partial(self._head, path), timeout_s=self._calls.timeout_s) for path in paths)
        return await asyncio.gather(*asked)

    async def remove(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> None:
        """Drop blobs, in as few requests as the store's protocol needs."""
        paths = [self._names.at_rest(key).path for key in keys]
        await self._calls.ask("delete", lambda: self._remove(paths), timeout_s=timeout_s)

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a blob. It is asked for first, since stores answer alike whether there was one or not."""
        path = self._names.at_rest(key).path
        return self._calls.call("delete", lambda: self._delete(path), timeout_s=timeout_s)

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """Yield the chunks of a namespace, page by page; objects of other names are passed over.

        Each page has the store's time-out. Raises TransportError when a page cannot be had.
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
        """Why the store counts as one that does not answer; "" while it does."""
        return self._calls.fault

    def probe(self) -> None:
        """Ask for an object that is never there, in as far as the breaker lets this call through. Blocking.

        Raises TransportError when the store does not answer, or its bucket is missing.
        """
        self._calls.call("probe", lambda: self._get(PROBE_NAME, 0), timeout_s=self._calls.timeout_s)

    def close(self) -> None:
        self._calls.close()

    def _checked(self, key: ChunkKey, most: int, body: Bytes | bytes | None, asked_s: float) -> memoryview | None:
        if body is None:
            self._note_absent(key, asked_s)
            return None
        measures.REMOTE_BYTES.labels("down").inc(len(body))
        if len(body) > most:
            raise IntegrityError(f"{self._names.at_rest(key).path} has more than {most} bytes in {self.location}")
        return memoryview(body)

    async def _store_whole(self, path: str, body: bytes, is_stale: IsStale) -> Answer[Stored]:
        if (await self._put(path, body)).value:
            return Answer("ok", "new")
        nbytes = (await self._head(path)).value
        if nbytes == len(body) and not is_stale(nbytes, await self._store.front(path, FRONT_BYTES)):
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
            # Some stores take one that is gone for a failure of all.
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

    async def _delete(self, path: str) -> Answer[bool]:
        if (await self._head(path)).outcome == "missing":
            return Answer("missing", False)
        try:
            await self._store.delete(path)
        except FileNotFoundError:
            return Answer("missing", False)  # Somebody else dropped it meanwhile.
        return Answer("ok", True)

    def _is_known_absent(self, key: ChunkKey) -> bool:
        with self._absence_lock:
            is_absent = self._absence.is_absent(key, self._clock())
        if is_absent:
            measures.REMOTE_REQUESTS.labels("get", "known_missing").inc()
        return is_absent

    def _note_absent(self, key: ChunkKey, asked_s: float) -> None:
        with self._absence_lock:
            self._absence.note(key, asked_s=asked_s, now_s=self._clock())
