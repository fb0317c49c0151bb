"""One chunk out of a tier, verified. Blocking: for I/O threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.storage.backends import ChunkBackend, ChunkKey
from services.storage.chunk_format import ChunkHeader
from services.storage.chunk_sealing import Cipher
from services.storage.chunk_verification import verify_chunk
from shared.messages.pools import KvGeometry


class ReadChunk(Protocol):
    """Read ``key`` from ``backend`` to the front of ``buffer``, and show that it is what it should be."""

    def __call__(
        self, backend: ChunkBackend, key: ChunkKey, buffer: memoryview, *, timeout_s: float
    ) -> ChunkHeader | None:
        """Read the header of the chunk, whose blob begins where ``buffer`` begins; None if the tier lacks it.

        Raises IntegrityError when it is damaged, another's or not readable with the key at hand, ConfigError when
        there is no key, TransportError when the tier failed.
        """


@dataclass(frozen=True, slots=True)
class VerifiedRead:
    """Reads and opens with one key. The blob in the buffer is not sealed any more then."""

    geometry: KvGeometry
    cipher: Cipher
    key_id: str

    def __call__(
        self, backend: ChunkBackend, key: ChunkKey, buffer: memoryview, *, timeout_s: float
    ) -> ChunkHeader | None:
        """See :class:`ReadChunk`."""
        nbytes = backend.get(key, buffer, timeout_s=timeout_s)
        if not nbytes:
            return None
        return self.verify(buffer[:nbytes], key)

    def verify(self, blob: memoryview, key: ChunkKey) -> ChunkHeader:
        """Open what was read, and show that it is ``key``. Raises IntegrityError, or ConfigError without its key."""
        return verify_chunk(blob, key, self.geometry, cipher=self.cipher, key_id=self.key_id)
