"""The tiers below host memory: what a backend (disk, object store) must do. One module per backend goes here.

A backend keeps **chunks**: self-describing records of KV (DESIGN: identity and integrity), addressed by the
identity of their last page. What the storage relies on, and what a conformance suite must check for each:

* a chunk is visible only whole: ``put`` that was interrupted, by an error or by ``kill -9``, leaves either the
  whole chunk or nothing;
* what ``get`` returns is what was put, to the byte, or it raises IntegrityError; it never returns other bytes;
* ``get`` and ``delete`` of what is not there are answered (None, False), not raised;
* being full, unreachable or broken is TransportError (CapacityError where the budget is used up), within the
  given time; the storage goes on without the tier;
* every call may run in any I/O thread, and calls for different chunks at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shared.messages.pools import KvGeometry


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """What a chunk is: whose KV (namespace, hex digest), of which tokens (identity, 16 bytes), in which shape."""

    namespace: str
    identity: bytes
    geometry: KvGeometry


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One line of a tier's inventory. ``nbytes`` counts the chunk's KV and header."""

    key: ChunkKey
    nbytes: int


class TierBackend(Protocol):
    """A tier that keeps chunks. Blocking: the storage calls it in I/O threads. Errors are ``shared.errors``."""

    name: str

    def put(self, key: ChunkKey, kv: memoryview, *, timeout_s: float) -> None:
        """Keep the page-first KV of a chunk durably; a chunk that is there already is kept as it is."""

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> bool:
        """Read a chunk's KV into ``into`` (of exactly its size), verified. False if the tier lacks it."""

    def delete(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a chunk. False if the tier lacked it."""

    def entries(self) -> Iterator[ChunkEntry]:
        """Everything that the tier holds, in order of ``(namespace, identity)``; used to become warm at a start."""

    def close(self) -> None:
        """Finish writes under way and let go of the tier; idempotent."""
