"""The owners of namespaces with a quota in the object store, remembered beside the chunks on the disk.

Orders name the owner of a namespace, and after a start none has come yet when the disk is compared with the store. The
remembered owners hold until an order names others, so that nothing exceeds a quota meanwhile. The file is small, and is
rewritten after a change, to every directory of the disk, because each of them may be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.storage.core.remote_shares import RemoteShares
from shared import logs

OWNERS_FILE = "remote-owners.json"
MAX_BYTES = 32 * 2**20
WRITE_EVERY_S = 5.0

Owned = dict[str, tuple[str, int]]
"""Owner and quota, in bytes, by namespace."""

_log = logs.get_logger("storage")


class RemoteOwners:
    """The remembered owners. Owned by the event loop. ``run`` writes changes until it is cancelled."""

    def __init__(self, shares: RemoteShares, directories: Sequence[str]) -> None:
        """Remember the owners of ``shares`` in a file in each of ``directories``; with none, only in memory."""
        self._shares = shares
        self._files = [Path(directory) / OWNERS_FILE for directory in directories]
        self._changed = asyncio.Event()

    def learn(self, namespace: str, owner: str, quota: int) -> None:
        """Note an owner as ``RemoteShares.learn`` does, and have it written."""
        if self._shares.learn(namespace, owner, quota):
            self._changed.set()

    async def load(self) -> None:
        """Read the remembered owners of namespaces that no order has named since."""
        for namespace, (owner, quota) in (await asyncio.to_thread(_read, self._files)).items():
            if not self._shares.knows(namespace):
                self._shares.learn(namespace, owner, quota)

    async def run(self) -> None:
        """Write changes, every few seconds at the most, and at the end."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                writing = asyncio.create_task(asyncio.to_thread(_write, self._files, self._shares.bounded()))
                try:
                    await asyncio.shield(writing)
                except asyncio.CancelledError:
                    await writing  # Two writes must not overlap.
                    raise
                await asyncio.sleep(WRITE_EVERY_S)
        finally:
            if self._changed.is_set():
                _write(self._files, self._shares.bounded())


def _read(files: list[Path]) -> Owned:
    """Return the files' contents together; for a namespace in several, the latest file counts."""
    found: list[tuple[int, Owned]] = []
    for file in files:
        try:
            with file.open("rb") as opened:
                data, written_ns = opened.read(MAX_BYTES), os.fstat(opened.fileno()).st_mtime_ns
            found.append((written_ns, msgspec.json.decode(data, type=Owned)))
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("remote_owners_not_read", file=str(file), reason=str(error))
    owned: Owned = {}
    for _, each in sorted(found, key=lambda dated: dated[0]):
        owned |= each
    return owned


def _write(files: list[Path], owned: Owned) -> None:
    data = msgspec.json.encode(owned)
    for file in files:
        fresh = file.with_name(f".{file.name}")
        try:
            with open(fresh, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
            fresh.replace(file)
        except OSError as error:
            _log.warning("remote_owners_not_written", file=str(file), reason=str(error))
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
