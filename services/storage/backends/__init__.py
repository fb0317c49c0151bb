"""The tiers below host memory: what a backend (memory, disk, object store) must do. One module per backend.

A backend keeps **blobs** under the names of chunks: a blob is a chunk's header and KV as :mod:`chunk_format` writes
them, sealed or encrypted; what is in it is not the backend's business. What the storage relies on, and what the
conformance suite checks for each:

* a blob is visible only whole: ``put`` that was interrupted, by an error or by ``kill -9``, leaves either the
  whole blob or nothing that ``get`` or ``entries`` would speak of;
* ``put`` returns when the blob is there for every reader, also after ``kill -9``; a blob that is there already is kept
  as it is. After a loss of power it may be gone, or torn, as every reader finds out;
* ``get`` and ``delete`` of what is not there are answered (0, False), not raised;
* being unreachable or broken is TransportError, within the given time; being full is CapacityError; the storage goes
  on without the tier;
* every call may run in any I/O thread, and calls for different chunks at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from shared.chunks import GEOMETRY_BYTES
from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES

BLOCK_BYTES = 4096
"""Blobs are whole blocks, and buffers for them begin on a block: what O_DIRECT asks for."""

SEALED = ".sealed"


@dataclass(frozen=True, slots=True, order=True)
class ChunkKey:
    """The name of a chunk: its namespace (hex digits), its shape (8 bytes), and the digest of its tokens (16 bytes).

    Where ``is_sealed``, it is the name at rest of an encrypted chunk: its identity is hidden (``chunk_names``).
    """

    namespace: str
    geometry: bytes
    identity: bytes
    is_sealed: bool = False

    @property
    def path(self) -> str:
        """The name in a directory or an object store: ``<namespace>/<geometry>/<two digits>/<identity>``, with
        ``.sealed`` behind it where it is.
        """
        digits = self.identity.hex()
        return f"{self.namespace}/{self.geometry.hex()}/{digits[:2]}/{digits}{SEALED if self.is_sealed else ''}"

    @classmethod
    def parse(cls, path: str) -> ChunkKey:
        """Undo :attr:`path`. Raises InvalidRequest for anything else."""
        parts = path.split("/")
        try:
            identity, is_sealed = parts[3].removesuffix(SEALED), parts[3].endswith(SEALED)
            key = cls(parts[0], bytes.fromhex(parts[1]), bytes.fromhex(identity), is_sealed)
            is_sound = len(bytes.fromhex(parts[0])) == DIGEST_BYTES == len(key.identity)
        except (ValueError, IndexError) as error:
            raise InvalidRequest(f"{path!r} is not the name of a chunk") from error
        if not is_sound or len(key.geometry) != GEOMETRY_BYTES or key.path != path:
            raise InvalidRequest(f"{path!r} is not the name of a chunk")
        return key


UNKNOWN = -1
"""Place of a chunk whose place in its sequence is unknown."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One line of a tier's inventory; what was not read has its default."""

    key: ChunkKey
    nbytes: int
    place: int = UNKNOWN
    """Chunks before it in its sequence."""
    parent: ChunkKey | None = None
    """The chunk before it; None at the root, or where that is not known."""
    heat: float | None = None
    """What it was worth when that was noted last (``core/chunk_worth.py``); None where it was not."""
    key_id: str = ""
    """Whose key seals it; "" is none."""


class ChunkBackend(Protocol):
    """A tier that keeps chunks. Blocking: the storage calls it in I/O threads. Errors are ``shared.errors``."""

    name: str

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        """Keep a blob of whole blocks; False if the tier had it already.

        ``stripe`` is the chunk's place in its sequence: a backend of several directories takes them in turn by it,
        so that reading a sequence uses all of them (HCache 4.2.1).
        """

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """Read a blob to the front of ``into``, which begins on a block; returns its bytes, 0 if the tier lacks it.

        Raises IntegrityError if there is more than ``into`` can take.
        """

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a blob. False if the tier lacked it."""

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """Everything that the tier holds (of a namespace), in any order; used to become warm at a start."""

    def close(self) -> None:
        """Finish writes under way and let go of the tier; idempotent."""


@runtime_checkable
class PartialReads(Protocol):
    """A tier whose blobs can be read in part, and replaced: what sparse copies of chunks need."""

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        """Read ranges (offset, bytes) of a blob, whole blocks each; returns the bytes of the blob, 0 without one.

        Offset ``first`` of the blob, a whole block at or before every range, comes to the front of ``into``, which
        begins on a block; between ranges ``into`` stays as it is. Raises IntegrityError (``truncated``) for a blob that
        ends before they do, and InvalidRequest for ranges that are no whole blocks or not within ``into``.
        """

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        """Put ``blob`` in the place of one of as many bytes; False, and nothing is done, if the tier lacks it.

        A concurrent reader has either; ended anywhere, by an error or by ``kill -9``, one of them is there whole.
        """


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What became of a chunk that could not be read."""

    left_bytes: int = 0
    """Of its file, which could not be taken away either."""
    directory: str = ""
    """Is left out from now on, because nothing in it can be read; "" where the chunk alone was bad."""
    keys: tuple[ChunkKey, ...] = ()
    """What lay in it."""


@runtime_checkable
class Directories(ChunkBackend, Protocol):
    """A tier of directories, called by their paths; some may be missing for a while.

    Those that name a directory touch no other, and may hang as long as it does. Calls block where nothing else is said.
    """

    left_out: dict[str, str]  # Directories that are not used, and why.
    failing: dict[str, str]  # Those in use to which the last write failed, and why.

    def paths(self) -> list[str]:
        """Return the directories in use, in the order in which they take blobs. Does not block."""

    def place_of(self, key: ChunkKey) -> tuple[str, int]:
        """Return the directory and the bytes of a blob; ("", 0) without one. Does not block."""

    def turn_of(self, stripe: int) -> str:
        """Return the directory for the next blob of this ``stripe``, if it can take it; "" where none is in use.
        Does not block.
        """

    def entries_in(self, path: str) -> Iterator[ChunkEntry]:
        """Yield those of ``entries`` that are in one directory in use."""

    def disown(self, key: ChunkKey) -> None:
        """Know nothing of a blob any more; its file stays as it is, until its directory is looked through again. Does
        not block.
        """

    def unreadable(self, key: ChunkKey, reason: str, *, timeout_s: float) -> Unreadable:
        """Find out, after a failed read, whether the blob or its whole directory is bad, and do without it."""

    def leave(self, path: str, reason: str) -> tuple[ChunkKey, ...]:
        """Use a directory no more, until :meth:`retake`; returns what lay in it. It is not touched."""

    def retake(self, path: str) -> bool:
        """Try what is left out once more; whether it is in use now."""

    def keep_heats(self, path: str, heats: Mapping[ChunkKey, float]) -> None:
        """Note what blobs of a directory are worth, for ``ChunkEntry.heat`` of a later start; what cannot be written is
        not noted.
        """

    def probe(self, path: str) -> bool:
        """Write to a directory in use, which is failing from then on or is not; whether it is not."""

    def free_bytes(self) -> int:
        """Bytes that are free in the directories' file systems. Raises OSError."""


@runtime_checkable
class Listing(Protocol):
    """A tier that knows what it holds without reading a chunk."""

    def shapes(self) -> Mapping[bytes, int]:
        """Chunks by the digest of their geometry, as their names have it."""


Stored = Literal["new", "there", "replaced"]

IsStale = Callable[[int, bytes], bool]
"""Whether what lies under a name is not the chunk that belongs there, by its size and its first ``FRONT_BYTES``."""

FRONT_BYTES = 256

REMOTE_WIDTH = 64
"""Requests to a store that read, and as many that write, which are under way at once. A round trip of 50 ms lets
through 1,280 of each a second."""


class RemoteBackend(ChunkBackend, Protocol):
    """A tier across a network: many requests are under way at once, and none of them holds a thread.

    Errors are those of :class:`ChunkBackend`.
    """

    @property
    def fault(self) -> str:
        """Why it counts as one that does not answer; "" while it does."""

    def probe(self) -> object:
        """Ask it for anything. Blocking. Raises TransportError."""

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        """Read a whole blob; None if the tier lacks it. Raises IntegrityError if it has more than ``most`` bytes."""

    async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
        """Keep a blob durably. One that is there already stays, unless it has another size or ``is_stale`` says so."""

    async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Bytes of each of these blobs, which are of one namespace and shape and in order of their paths; 0 if the
        tier lacks it.
        """

    async def remove(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> None:
        """Drop blobs, as many at once as the tier's protocol allows; fine for those that it lacks."""


def check_ranges(ranges: Sequence[tuple[int, int]], into: memoryview, first: int) -> None:
    """Raise InvalidRequest for ranges that ``read_ranges`` cannot read."""
    for offset, nbytes in ranges:
        if first < 0 or nbytes < 1 or offset % BLOCK_BYTES or nbytes % BLOCK_BYTES or first % BLOCK_BYTES:
            raise InvalidRequest(f"{nbytes} bytes at {offset} are not whole blocks")
        if offset < first or offset + nbytes - first > into.nbytes:
            raise InvalidRequest(f"{nbytes} bytes at {offset} do not fit in {into.nbytes} bytes from {first} on")
