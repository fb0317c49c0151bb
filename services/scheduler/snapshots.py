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
    state: memoryview  # Of a decoded one: in the memory that was decoded.
    release: str = ""  # Of the fold that made the state, see fold_release; "" where 0.1 took it.
    said: int = 0  # Digest of all outputs up to ``seq``, see ``output_chain``.


def object_name(seq: int) -> str:
    """Names sort by sequence."""
    return f"{_PREFIX}{seq:020d}"


def take_snapshot(fold: Fold, release: str = "", said: int = 0) -> Snapshot:
    """Encode the state as it is now, which ``release`` made; pauses the caller for as long as that takes.

    ``said`` digests its outputs.
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
    """Return the object's bytes."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(data: bytes | memoryview) -> Snapshot:
    """Decode the bytes. Raises RecordingError when they are damaged or of another version."""
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
    """The bucket's view of them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def put(self, seq: int, data: bytes) -> None:
        """Store the bytes of the snapshot behind input ``seq``, and delete all but the newest of those up to it."""
        await self._bus.put_object(object_name(seq), data)
        names = await self._names()
        for name in [name for name in names if name <= object_name(seq)][:-KEPT]:
            await self._bus.delete_object(name)

    async def delete(self, seq: int) -> None:
        """Delete the one of this sequence."""
        await self._bus.delete_object(object_name(seq))

    async def newest_first(self) -> AsyncIterator[Snapshot]:
        """Every undamaged snapshot."""
        for name in reversed(await self._names()):
            snapshot = await self._read(name)
            if snapshot is not None:
                yield snapshot

    async def oldest_first(self) -> AsyncIterator[Snapshot]:
        """Every undamaged snapshot, for a recording that should go back as far as it can."""
        for name in await self._names():
            snapshot = await self._read(name)
            if snapshot is not None:
                yield snapshot

    async def newest_seq(self) -> int:
        """Sequence of the newest one, whether or not it can be used; 0 where there is none."""
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
    """Whether the stream can be folded on from this snapshot: it goes on right behind it, and is the same stream.

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
