"""The requests that the remote tier makes, one function each: the thin layer over the library, and the tests' seam."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from services.storage.backends.file_calls import FileCalls
from services.storage.backends.remote_location import RemoteLocation

if TYPE_CHECKING:
    from obstore import Bytes, ListStream, ObjectMeta, PutMode
    from obstore.store import ObjectStore

LIST_PAGE = 1000


class StoreCalls:
    """The library's calls. Awaited on one event loop. Raises its own exceptions, which ``store_errors`` understands."""

    def __init__(self, location: RemoteLocation, store: ObjectStore, files: FileCalls | None = None) -> None:
        """Wrap ``store``, the library's client. Blocking where ``location`` is a directory.

        Writes to a directory are also synced to the disk, and nothing is called while its file system is not mounted,
        which would write to the one below. ``files`` is an argument for tests.
        """
        self._store = store
        self._directory = Path(location.prefix) if location.scheme == "file" else None
        self._files = files or FileCalls()
        self._above: frozenset[int] = frozenset()  # Devices that the directory is on only without its own.
        if self._directory:
            path = str(self._directory)
            self._above = self._files.devices_above(path) - {self._files.device(path)}

    async def put(self, path: str, body: bytes, mode: PutMode) -> None:
        """Write an object so that it is seen only whole, and is durable when this returns."""
        await self._check_mounted()
        await obstore.put_async(self._store, path, body, mode=mode, use_multipart=False)
        if self._directory:
            # The library lets the kernel decide when a file reaches the disk; the storage requires it to be there.
            await asyncio.to_thread(_sync, self._directory / path)

    async def get(self, path: str, most: int) -> Bytes:
        """Read the bytes of a non-empty object; if it has more than ``most``, one more than that.

        A range: asked for the whole, the library answers twice, and lets the body wait in between.
        """
        await self._check_mounted()
        return await obstore.get_range_async(self._store, path, start=0, length=most + 1)

    async def head(self, path: str) -> int:
        """Return how many bytes an object has. Raises FileNotFoundError if there is no such object."""
        await self._check_mounted()
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

    async def _check_mounted(self) -> None:
        """Raise OSError while the directory is missing, or is one of the file system below."""
        if self._above and not await asyncio.to_thread(self._is_mounted, str(self._directory)):
            raise OSError(
                errno.ENODEV,
                f"the file system of {self._directory} is not mounted. The directory is used again once it is mounted "
                "there, and what is there now after a new start of this storage",
            )

    def _is_mounted(self, path: str) -> bool:
        try:
            return self._files.device(path) not in self._above
        except FileNotFoundError:
            return False


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
