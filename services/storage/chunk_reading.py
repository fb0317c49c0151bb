"""Reading of one chunk from a tier, with all checks of its blob in the right order. Blocking: for I/O threads."""

from __future__ import annotations

from dataclasses import dataclass

from services.storage.backends import ChunkBackend, ChunkKey
from services.storage.chunk_format import ChunkHeader, check, read_header
from services.storage.chunk_payload import verify_payload
from services.storage.chunk_sealing import Cipher, open_blob
from shared.messages.pools import KvGeometry


@dataclass(frozen=True, slots=True)
class VerifiedRead:
    """Reads and opens with one key. The blob in the buffer is not sealed any more then."""

    geometry: KvGeometry
    cipher: Cipher
    key_id: str

    def __call__(
        self, backend: ChunkBackend, key: ChunkKey, buffer: memoryview, *, timeout_s: float
    ) -> ChunkHeader | None:
        """Read a blob to the front of ``buffer``, and :meth:`verify` it; return None if the tier lacks it.

        Raises TransportError when the tier failed.
        """
        nbytes = backend.get(key, buffer, timeout_s=timeout_s)
        if not nbytes:
            return None
        return self.verify(buffer[:nbytes], key)

    def verify(self, blob: memoryview, key: ChunkKey) -> ChunkHeader:
        """Open a blob that was read, and verify that it is ``key``.

        Raises IntegrityError, or ConfigError without its key.
        """
        return verify_chunk(blob, key, self.geometry, cipher=self.cipher, key_id=self.key_id)


def verify_chunk(
    blob: memoryview, key: ChunkKey, geometry: KvGeometry, *, cipher: Cipher | None = None, key_id: str = ""
) -> ChunkHeader:
    """Verify that ``blob`` (ending where the chunk ends) is the whole and undamaged chunk ``key``.

    It is opened in place. Its payload is then ``chunk_format.payload_view(blob, geometry)``, whose pages have the
    identities ``header.identities`` and the checksums ``header.checksums``: both go into the host pool as they are.
    Raises IntegrityError with a code of ``chunk_format`` or ``wrong_key``, and ConfigError when the key is not there.
    """
    header = open_chunk(blob, key, geometry, cipher=cipher, key_id=key_id)
    verify_payload(blob, header)
    return header


def open_chunk(
    blob: memoryview, key: ChunkKey, geometry: KvGeometry, *, cipher: Cipher | None = None, key_id: str = ""
) -> ChunkHeader:
    """Do all of :func:`verify_chunk` but the payload, which is still to be verified."""
    header = read_header(blob)
    # Checked before it is opened: whether a key opens it must reveal nothing of another tenant's chunk.
    check(header, key, geometry)
    opened = open_blob(blob, header, key_id, cipher)
    if opened is not header:
        # Its tokens could not be checked before.
        check(opened, key, geometry)
    return opened
