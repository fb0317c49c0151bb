"""Snapshots of the core in the bucket: named by sequence, self-describing, checksummed, the newest three kept."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import xxhash

from services.scheduler import core
from services.scheduler.fold import Fold
from shared import logs
from shared.bus.protocol import Bus
from shared.errors import RecordingError, TransportError
from shared.undecodable import UNDECODABLE

KEPT = 3
VERSION = 1

_PREFIX = "core-"

_log = logs.get_logger("snapshots")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A state of the core behind input ``seq``, whose stream timestamp was ``time_ns``."""

    version: int
    seq: int
    time_ns: int
    epoch: int
    digest: int  # xxh3_64 of ``state``
    state: memoryview  # Of a decoded snapshot: a view of the bytes that were decoded.
    release: str = ""  # Of the fold that made the state, see fold_release; "" where 0.1 took it.
    said: int = 0  # Digest of all outputs up to ``seq``, see ``output_chain``.


def object_name(seq: int) -> str:
    """Return the object's name in the bucket; names sort by sequence."""
    return f"{_PREFIX}{seq:020d}"


def take_snapshot(fold: Fold, release: str = "", said: int = 0) -> Snapshot:
    """Encode the state as it is now, which ``release`` made; pauses the caller for as long as that takes.

    ``said`` is the digest of all outputs up to now.
    """
    encoded = core.encode_state(fold.state)
    return Snapshot(
        version=VERSION,
        seq=fold.position,
        time_ns=fold.time_ns,
        epoch=fold.state.epoch,
        digest=xxhash.xxh3_64_intdigest(encoded),
        state=memoryview(encoded),
        release=release,
        said=said,
    )


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the object's bytes (MessagePack)."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(data: bytes | memoryview) -> Snapshot:
    """Decode the bytes, without copying the state. Raises RecordingError for damage or another version."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except UNDECODABLE as error:
        raise RecordingError(f"not a snapshot: {error}") from error
    if snapshot.version != VERSION:
        raise RecordingError(f"a snapshot of version {snapshot.version}, not {VERSION}")
    if xxhash.xxh3_64_intdigest(snapshot.state) != snapshot.digest:
        raise RecordingError(f"the snapshot at {snapshot.seq} is damaged")
    return snapshot


class SnapshotStore:
    """The snapshots in the broker's bucket."""

    def __init__(self, bus: Bus) -> None:
        """Use the bucket of ``bus``, which is not closed here."""
        self._bus = bus

    async def put(self, seq: int, data: bytes) -> None:
        """Store the bytes of the snapshot behind input ``seq``, and delete all but the newest of those up to it."""
        await self._bus.put_object(object_name(seq), data)
        names = await self._names()
        for name in [name for name in names if name <= object_name(seq)][:-KEPT]:
            await self._bus.delete_object(name)

    async def delete(self, seq: int) -> None:
        """Delete the snapshot behind input ``seq``."""
        await self._bus.delete_object(object_name(seq))

    async def newest_first(self) -> AsyncIterator[Snapshot]:
        """Yield every undamaged snapshot, newest first; damaged ones are logged."""
        for name in reversed(await self._names()):
            snapshot = await self._read(name)
            if snapshot is not None:
                yield snapshot

    async def oldest_first(self) -> AsyncIterator[Snapshot]:
        """Yield every undamaged snapshot, oldest first, for a recording that should go back as far as it can."""
        for name in await self._names():
            snapshot = await self._read(name)
            if snapshot is not None:
                yield snapshot

    async def newest_seq(self) -> int:
        """Return the sequence of the newest snapshot, damaged or not; 0 where there is none."""
        names = await self._names()
        return int(names[-1].removeprefix(_PREFIX)) if names else 0

    async def _names(self) -> list[str]:
        return [name for name in await self._bus.list_objects() if name.startswith(_PREFIX)]

    async def _read(self, name: str) -> Snapshot | None:
        try:
            data = await self._bus.get_object(name)
            return None if data is None else decode_snapshot(data)
        except (RecordingError, TransportError) as error:
            _log.error("snapshot_unusable", object=name, reason=error.message)
            return None


async def belongs_to_stream(bus: Bus, stream: str, snapshot: Snapshot) -> bool:
    """Return whether the stream is the snapshot's, and still has every input behind it.

    A stream that was deleted and made again counts from 1; the timestamp at the snapshot's sequence tells.
    """
    info = await bus.stream_info(stream)
    if not info.first_seq - 1 <= snapshot.seq <= info.last_seq:
        return False
    if snapshot.seq == 0:
        return True
    async for message in bus.follow(stream, from_seq=snapshot.seq, live=False):
        if message.seq == snapshot.seq:
            return message.time_ns == snapshot.time_ns
        return message.seq == snapshot.seq + 1 and message.time_ns >= snapshot.time_ns
    return True
