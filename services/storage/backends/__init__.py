"""The interface of backends (memory, disk, object store), the tiers below host memory. One module per backend.

A backend keeps **blobs** under the names of chunks: a blob is a chunk's header and KV as :mod:`chunk_format` writes
them, sealed or encrypted; a backend does not look into it. The storage relies on these properties, and the conformance
suite checks each:

* a blob is visible only whole: ``put`` (``store`` of a remote tier) that was interrupted, by an error or by
  ``kill -9``, leaves either the whole blob or nothing that ``get`` (``fetch``) or ``entries`` would report;
* ``put`` returns when the blob is there for every reader, also after ``kill -9``; a blob that is there already is kept
  as it is. After a loss of power it may be gone, or torn, as every reader finds out;
* ``get`` and ``delete`` of a missing blob are answered (0, False), not raised;
* being unreachable or broken is TransportError, within the given time; being full is CapacityError; the storage goes
  on without the tier;
* every call may run in any I/O thread, and calls for different chunks at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.chunks import GEOMETRY_BYTES
from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES

BLOCK_BYTES = 4096
"""Blobs are whole blocks, and buffers for them begin on a block, as O_DIRECT requires."""

SEALED = ".sealed"


def whole_blocks(nbytes: int) -> int:
    """Return the bytes of the fewest blocks that hold so many bytes."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


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
        """The name in a directory or an object store: ``<namespace>/<geometry>/<two digits>/<identity>``.

        ``.sealed`` is appended where it is sealed.
        """
        digits = self.identity.hex()
        return f"{self.namespace}/{self.geometry.hex()}/{digits[:2]}/{digits}{SEALED if self.is_sealed else ''}"

    @classmethod
    def parse(cls, path: str) -> ChunkKey:
        """Return the key with this :attr:`path`. Raises InvalidRequest for any other text."""
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
    """One line of a tier's inventory; fields that were not read have their defaults."""

    key: ChunkKey
    nbytes: int
    place: int = UNKNOWN
    """Chunks before it in its sequence."""
    parent: ChunkKey | None = None
    """The chunk before it; None at the root, or where that is not known."""
    heat: float | None = None
    """Its heat when that was noted last (``core/chunk_worth.py``); None without a note."""
    key_id: str = ""
    """Id of the key that seals it; "" is none."""


class ChunkBackend(Protocol):
    """A tier that keeps chunks. Blocking: the storage calls it in I/O threads. Errors are ``shared.errors``."""

    name: str

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        """Keep a blob of whole blocks; return False if the tier had it already.

        ``stripe`` is the chunk's place in its sequence: a backend of several directories takes them in turn by it, so
        that reading a sequence uses all of them (HCache 4.2.1).
        """

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        """Read a blob to the front of ``into``, which begins on a block; return its bytes, 0 if the tier lacks it.

        Raises IntegrityError if there is more than ``into`` can take.
        """

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Delete a blob; return False if the tier lacked it."""

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """Yield all chunks of the tier (of a namespace), in any order; used to become warm at a start."""

    def close(self) -> None:
        """Finish writes under way and release the tier; idempotent."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Result of judging a chunk that could not be read."""

    left_bytes: int = 0
    """Bytes of its file, if that could not be removed either."""
    is_directory_bad: bool = False
    """Whether nothing in its directory can be read, which the caller has to leave then. The chunk is untouched."""


class Directories(ChunkBackend, Protocol):
    """The disk: directories, identified by their paths; some may be missing for a while.

    Blobs can be read in part, and replaced, as sparse copies of chunks require. Calls that name a directory touch no
    other, and may hang as long as it does. Calls block unless they say otherwise.
    """

    left_out: dict[str, str]  # Reasons by directory that is not used.
    failing: dict[str, str]  # Reasons by directory in use to which the last write failed.

    def paths(self) -> list[str]:
        """Return the directories in use, in the order in which they take blobs. Does not block."""

    def place_of(self, key: ChunkKey) -> tuple[str, int]:
        """Return the directory and the bytes of a blob; ("", 0) without one. Does not block."""

    def turn_of(self, stripe: int) -> str:
        """Return the directory for the next blob of this ``stripe``, if it can take it; "" where none is in use.

        Does not block.
        """

    def entries_in(self, path: str) -> Iterator[ChunkEntry]:
        """Yield the ``entries`` that are in one directory in use."""

    def disown(self, key: ChunkKey) -> None:
        """Forget a blob; its file stays as it is, until its directory is scanned again. Does not block."""

    def unreadable(self, key: ChunkKey, *, timeout_s: float) -> Unreadable:
        """Find out, after a failed read, whether the blob or its whole directory is bad; drop the blob if it is."""

    def check(self, path: str) -> None:
        """Raise TransportError if a directory in use is not the one that was opened: unmounted, removed, replaced."""

    def leave(self, path: str, reason: str) -> tuple[ChunkKey, ...]:
        """Stop using a directory, without touching it, until :meth:`retake`; return the chunks that lay in it."""

    def retake(self, path: str) -> bool:
        """Try a directory that is left out again; return whether it is in use now."""

    def keep_heats(self, path: str, heats: Mapping[ChunkKey, float]) -> None:
        """Write the heats of a directory's blobs, for ``ChunkEntry.heat`` of a later start; failures are ignored."""

    def probe(self, path: str) -> bool:
        """Write to a directory in use; return whether that worked, and mark the directory as failing if not."""

    def free_bytes(self) -> int:
        """Return the free bytes of the directories' file systems. Raises OSError."""

    def shapes(self) -> Mapping[bytes, int]:
        """Return the number of blobs by the digest of their geometry, as in their names, without reading them."""

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        """Read ranges (offset, bytes) of a blob, whole blocks each; return the bytes of the blob, 0 without one.

        Offset ``first`` of the blob, a whole block at or before every range, comes to the front of ``into``, which
        begins on a block; between ranges ``into`` stays as it is. Raises IntegrityError (``truncated``) for a blob that
        ends before they do, and InvalidRequest for ranges that are no whole blocks or not within ``into``.
        """

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        """Put ``blob`` in the place of one of as many bytes; return False, with nothing done, if the tier lacks it.

        A concurrent reader has either; ended anywhere, by an error or by ``kill -9``, one of them is there whole.
        """

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a blob that failed verification; return False if the tier lacked it.

        A few are kept, for an operator to look at.
        """


Stored = Literal["new", "there", "replaced"]

IsStale = Callable[[int, bytes], bool]
"""Tells whether an object is not the chunk that its name says, by its size and its first ``FRONT_BYTES``."""

FRONT_BYTES = 256

REMOTE_WIDTH = 64
"""Reads of a store that are under way at once, and as many writes.

With a round trip of 50 ms these are 1,280 of each a second.
"""


class RemoteBackend(Protocol):
    """A tier across a network: many requests are under way at once, and none of them holds a thread.

    Errors are those of :class:`ChunkBackend`. What is not awaited blocks.
    """

    name: str

    def entries(self, namespace: str = "") -> Iterator[ChunkEntry]:
        """Yield the chunks of the tier as ``ChunkBackend.entries`` does."""

    def close(self) -> None:
        """Refuse new calls and release the tier; idempotent."""

    @property
    def fault(self) -> str:
        """Why the store counts as unreachable or full; "" while it answers and takes objects."""

    def probe(self) -> object:
        """Send the store any request. Raises TransportError without an answer."""

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        """Read a whole blob; return None if the tier lacks it.

        Raises IntegrityError if it has more than ``most`` bytes.
        """

    async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
        """Keep a blob durably. An existing one stays, unless it has another size or ``is_stale`` says so."""

    async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the bytes of the first of these blobs, of as many as the tier answers for at once; 0 if it lacks one.

        They are of one namespace and shape and in order of their paths.
        """

    async def remove(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> None:
        """Delete blobs, as many at once as the tier's protocol allows; missing ones are ignored."""


def check_ranges(ranges: Sequence[tuple[int, int]], into: memoryview, first: int) -> None:
    """Raise InvalidRequest for ranges that ``read_ranges`` cannot read."""
    for offset, nbytes in ranges:
        if first < 0 or nbytes < 1 or offset % BLOCK_BYTES or nbytes % BLOCK_BYTES or first % BLOCK_BYTES:
            raise InvalidRequest(f"{nbytes} bytes at {offset} are not whole blocks")
        if offset < first or offset + nbytes - first > into.nbytes:
            raise InvalidRequest(f"{nbytes} bytes at {offset} do not fit in {into.nbytes} bytes from {first} on")
