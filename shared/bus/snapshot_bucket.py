"""The snapshot bucket: a JetStream object store, in its documented layout (chunks, then a rolled-up meta message)."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.js.api import ObjectMeta, ObjectMetaOptions
from nats.js.object_store import ObjectStore

from shared import subjects
from shared.bus import requests
from shared.bus.jetstream import BUCKET_STREAM
from shared.bus.protocol import StreamMessage
from shared.errors import TransportError, Unavailable

LARGEST_CHUNK_BYTES = 128 * 1024

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
"""Reads all that a stream holds under a subject: ``read(stream, subject)``."""


def _meta_subject(name: str) -> str:
    return _META + base64.urlsafe_b64encode(name.encode()).decode()


class SnapshotBucket:
    """Puts, gets, lists and deletes. Errors: Unavailable, TransportError."""

    def __init__(self, client: Any, read: Read) -> None:
        self._store = ObjectStore(subjects.SNAPSHOT_BUCKET, BUCKET_STREAM, client.jetstream())
        self._read = read
        self._chunk_bytes = min(LARGEST_CHUNK_BYTES, client.max_payload // 2)

    async def put(self, name: str, data: bytes) -> None:
        meta = ObjectMeta(name=name, options=ObjectMetaOptions(max_chunk_size=self._chunk_bytes))
        try:
            await requests.apart(self._store.put(name, data, meta))
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot store object {name}: {error!r}") from error

    async def get(self, name: str) -> bytes | None:
        for _ in range(2):
            meta = await self._find(_meta_subject(name))
            if not meta or meta[0].deleted:
                return None
            data = b"".join([chunk.data async for chunk in self._read(BUCKET_STREAM, _CHUNKS + meta[0].nuid)])
            digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
            if len(data) == meta[0].size and digest.rstrip("=") == meta[0].digest.rstrip("="):
                return data
            # Somebody replaced the object between our two reads; its new chunks have another name.
        raise TransportError(f"object {name} is damaged")

    async def delete(self, name: str) -> None:
        try:
            await requests.apart(self._store.delete(name))
        except nats.js.errors.NotFoundError:
            pass  # Gone is what was asked for.
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot delete object {name}: {error!r}") from error

    async def names(self) -> list[str]:
        return sorted(meta.name for meta in await self._find(_META + ">") if not meta.deleted)

    async def _find(self, subject: str) -> list[_Meta]:
        latest: dict[str, _Meta] = {}
        async for message in self._read(BUCKET_STREAM, subject):
            meta = msgspec.json.decode(message.data, type=_Meta)
            latest[meta.name] = meta
        return list(latest.values())
