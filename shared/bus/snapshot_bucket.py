"""The snapshot bucket: a JetStream object store, in its documented layout (chunks, then a rolled-up meta message).

Only deleting differs. Object stores leave a permanent mark for every deleted name; our names count upwards, so there
would be another with every snapshot, and every list of names would read them all. We purge the name too. Whole blocks
of the stream then become empty and are removed, in place of being rewritten around the marks.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mmap
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import nats.errors
from nats.js.api import ObjectMeta, ObjectMetaOptions
from nats.js.object_store import ObjectStore

from shared import subjects
from shared.bus import jetstream, requests
from shared.bus.jetstream import BUCKET_STREAM
from shared.bus.protocol import StreamMessage
from shared.errors import TransportError, Unavailable
from shared.undecodable import UNDECODABLE

LARGEST_CHUNK_BYTES = 128 * 1024

DIGESTED_BYTES = 16 << 20
"""Bytes digested at once, while the next ones are read."""

_META = f"$O.{subjects.SNAPSHOT_BUCKET}.M."
_CHUNKS = f"$O.{subjects.SNAPSHOT_BUCKET}.C."


class _Meta(msgspec.Struct):
    """The fields of an object's meta message that we need."""

    name: str
    nuid: str = ""
    size: int = 0
    digest: str = ""
    deleted: bool = False


Read = Callable[[str, str], AsyncIterator[StreamMessage]]
"""Reads all messages of a stream under a subject: ``read(stream, subject)``."""


def _meta_subject(name: str) -> str:
    return _META + base64.urlsafe_b64encode(name.encode()).decode()


class SnapshotBucket:
    """The objects of the bucket. Its methods raise Unavailable and TransportError."""

    def __init__(self, client: Any, read: Read) -> None:
        """Use ``client``, which must be connected: its ``max_payload`` bounds the chunks."""
        self._client = client
        self._store = ObjectStore(subjects.SNAPSHOT_BUCKET, BUCKET_STREAM, client.jetstream())
        self._read = read
        self._chunk_bytes = min(LARGEST_CHUNK_BYTES, client.max_payload // 2)

    async def put(self, name: str, data: bytes) -> None:
        """Store an object in chunks of at most 128 KiB, replacing one of the same name. Raises Unavailable."""
        meta = ObjectMeta(name=name, options=ObjectMetaOptions(max_chunk_size=self._chunk_bytes))
        try:
            await requests.apart(self._store.put(name, data, meta))
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot store object {name}: {error!r}") from error

    async def get(self, name: str) -> bytes | memoryview | None:
        """Return an object whose digest was verified; None where there is none.

        Raises TransportError for a damaged one.
        """
        for _ in range(2):
            found = next((meta for _, meta in await self._find(_meta_subject(name))), None)
            if found is None or found.deleted:
                return None
            data = await self._chunks(found)
            if data is not None:
                return data
            # The object was replaced between our two reads; its new chunks have another name.
        raise TransportError(f"object {name} is damaged")

    async def _chunks(self, meta: _Meta) -> bytes | memoryview | None:
        """Return an object's bytes; None where its meta message does not match.

        Raises TransportError for an object that memory cannot hold.
        """
        memory, filled = _room(meta), 0
        digest, digested = hashlib.sha256(), 0
        digesting: asyncio.Future[None] | None = None
        async for chunk in self._read(BUCKET_STREAM, _CHUNKS + meta.nuid):
            end = filled + len(chunk.data)
            if end > len(memory):
                break  # With more chunks than announced, the digest cannot match.
            memory[filled:end] = chunk.data
            filled = end
            if filled - digested >= DIGESTED_BYTES:
                if digesting is not None:
                    await digesting
                digesting = asyncio.ensure_future(asyncio.to_thread(digest.update, memory[digested:filled]))
                digested = filled
        if digesting is not None:
            await digesting
        digest.update(memory[digested:filled])
        told = "SHA-256=" + base64.urlsafe_b64encode(digest.digest()).decode()
        is_whole = filled == meta.size and told.rstrip("=") == meta.digest.rstrip("=")
        return memory.toreadonly() if is_whole else None

    async def delete(self, name: str) -> None:
        """Delete an object, if it exists, and the chunks of unfinished puts."""
        found = await self._find(_meta_subject(name))
        await self._purge(_meta_subject(name))
        for meta in [meta for _, meta in found if meta.nuid]:
            await self._purge(_CHUNKS + meta.nuid)
        await self._drop_unfinished()

    async def _drop_unfinished(self) -> None:
        """Purge chunks of no object that are older than the oldest one: later ones may still get their meta message."""
        found = await self._find(_META + ">")
        known = {_CHUNKS + meta.nuid for _, meta in found if not meta.deleted}
        if not known:
            return
        answer = await jetstream.checked_request(
            self._client, f"STREAM.INFO.{BUCKET_STREAM}", {"subjects_filter": f"{_CHUNKS}>"}
        )
        oldest = min(seq for seq, meta in found if not meta.deleted)
        for subject in sorted(set(answer["state"].get("subjects") or {}) - known):
            await self._purge(subject, before_seq=oldest)

    async def _purge(self, subject: str, *, before_seq: int = 0) -> None:
        """Remove all messages of a subject, or those with smaller sequence numbers than ``before_seq``."""
        body: dict[str, Any] = {"filter": subject}
        if before_seq:
            body["seq"] = before_seq
        await jetstream.checked_request(self._client, f"STREAM.PURGE.{BUCKET_STREAM}", body)

    async def names(self) -> list[str]:
        """Return the names of all objects that are not deleted, sorted."""
        return sorted(meta.name for _, meta in await self._find(_META + ">") if not meta.deleted)

    async def _find(self, subject: str) -> list[tuple[int, _Meta]]:
        """Return the newest meta message of each object, with its sequence number."""
        latest: dict[str, tuple[int, _Meta]] = {}
        async for message in self._read(BUCKET_STREAM, subject):
            try:
                meta = msgspec.json.decode(message.data, type=_Meta)
            except UNDECODABLE as error:
                raise TransportError(f"an entry of the bucket cannot be read: {error}") from error
            latest[meta.name] = message.seq, meta
        return list(latest.values())


def _room(meta: _Meta) -> memoryview:
    """Return memory for an object, in large pages where the system has any. Raises TransportError.

    Most of the time of fetching a large snapshot is the kernel's, which hands memory out page by page.
    """
    if not meta.size:
        return memoryview(bytearray())
    try:
        # Shared memory, which is what Python maps by default, has large pages only where the system has them for tmpfs.
        memory = mmap.mmap(-1, meta.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise TransportError(f"object {meta.name} of {meta.size} bytes cannot be held: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
