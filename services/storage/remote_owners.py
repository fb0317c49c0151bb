"""Whose namespaces have a quota in the object store, remembered beside the chunks on the disk.

Orders say whose a namespace is, and after a start none has come yet when the disk is compared with the store. What was
known before holds until an order says otherwise, so that nothing goes beyond a quota meanwhile. The file is small, and
is written anew when something changed, to every directory of the disk, because each of them may be lost.
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
    """Owned by the event loop. ``run`` writes what changed until it is cancelled."""

    def __init__(self, shares: RemoteShares, directories: Sequence[str]) -> None:
        self._shares = shares
        self._files = [Path(directory) / OWNERS_FILE for directory in directories]
        self._changed = asyncio.Event()

    def learn(self, namespace: str, owner: str, quota: int) -> None:
        """As ``RemoteShares.learn``, and keep it."""
        if self._shares.learn(namespace, owner, quota):
            self._changed.set()

    async def load(self) -> None:
        """Take over what was known, of what no order has told of since."""
        for namespace, (owner, quota) in (await asyncio.to_thread(_read, self._files)).items():
            if not self._shares.knows(namespace):
                self._shares.learn(namespace, owner, quota)

    async def run(self) -> None:
        """Write what changed, every few seconds at the most, and at the end."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                writing = asyncio.create_task(asyncio.to_thread(_write, self._files, self._shares.bounded()))
                try:
                    await asyncio.shield(writing)
                except asyncio.CancelledError:
                    await writing  # Two must not write at once.
                    raise
                await asyncio.sleep(WRITE_EVERY_S)
        finally:
            if self._changed.is_set():
                _write(self._files, self._shares.bounded())


def _read(files: list[Path]) -> Owned:
    """Return what the files hold together; of a namespace that several name, what the latest says."""
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
