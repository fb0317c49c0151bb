"""The requests that the remote tier makes, one function each: the thin layer over the library, and the tests' seam."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from services.storage.backends.remote_location import RemoteLocation

if TYPE_CHECKING:
    from obstore import Bytes, ListStream, ObjectMeta, PutMode
    from obstore.store import ObjectStore

LIST_PAGE = 1000


class StoreCalls:
    """The library's calls. Awaited on one event loop. Raises its own exceptions, which ``store_errors`` understands."""

    def __init__(self, location: RemoteLocation, store: ObjectStore) -> None:
        """Wrap ``store``, the library's client; if ``location`` is a directory, writes are also synced to the disk."""
        self._store = store
        self._directory = Path(location.prefix) if location.scheme == "file" else None

    async def put(self, path: str, body: bytes, mode: PutMode) -> None:
        """Write an object so that it is seen only whole, and is durable when this returns."""
        await obstore.put_async(self._store, path, body, mode=mode, use_multipart=False)
        if self._directory:
            # The library lets the kernel decide when a file reaches the disk; the storage requires it to be there.
            await asyncio.get_running_loop().run_in_executor(None, _sync, self._directory / path)

    async def get(self, path: str, most: int) -> Bytes:
        """Read the bytes of a non-empty object; if it has more than ``most``, one more than that.

        A range: asked for the whole, the library answers twice, and lets the body wait in between.
        """
        return await obstore.get_range_async(self._store, path, start=0, length=most + 1)

    async def head(self, path: str) -> int:
        """Return how many bytes an object has. Raises FileNotFoundError if there is no such object."""
        return (await obstore.head_async(self._store, path))["size"]

    async def delete(self, path: str) -> None:
        """Delete an object; some stores raise FileNotFoundError if there is none."""
        await obstore.delete_async(self._store, path)

    async def delete_all(self, paths: Sequence[str]) -> None:
        """Delete objects in as few requests as the store's protocol needs; like :meth:`delete` for each."""
        await obstore.delete_async(self._store, paths)

    def list(self, prefix: str | None, after: str | None) -> ListStream[Sequence[ObjectMeta]]:
        """Return a listing of objects below a prefix, behind a name where the store lists in order."""
        return obstore.list(self._store, prefix, offset=after, chunk_size=LIST_PAGE)

    async def page(self, stream: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta]:
        """Return the next page of a listing, empty at its end."""
        # The builtin anext() with a default does not understand the library's iterator, and breaks the interpreter.
        try:
            return await stream.__anext__()
        except StopAsyncIteration:
            return ()


def _sync(path: Path) -> None:
    for place in (path, path.parent):
        try:
            descriptor = os.open(place, os.O_RDONLY)
        except FileNotFoundError:
            return  # Deleted meanwhile, perhaps by another node.
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
