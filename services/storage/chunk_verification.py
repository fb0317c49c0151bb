"""Everything that a blob must stand before its KV may be used, in the one right order."""

from __future__ import annotations

from services.storage.backends import ChunkKey
from services.storage.chunk_format import ChunkHeader, check, read_header
from services.storage.chunk_payload import verify_payload
from services.storage.chunk_sealing import Cipher, open_blob
from shared.messages.pools import KvGeometry


def verify_chunk(
    blob: memoryview, key: ChunkKey, geometry: KvGeometry, *, cipher: Cipher | None = None, key_id: str = ""
) -> ChunkHeader:
    """Show that ``blob`` (ending where the chunk ends) is the whole and unharmed chunk ``key``; opened where it lies.

    Its payload is then ``chunk_format.payload_view(blob, geometry)``, whose pages have the identities
    ``header.identities`` and the checksums ``header.checksums``: both go into the host pool as they are. Raises
    IntegrityError with a code of ``chunk_format`` or ``wrong_key``, and ConfigError when the key is not there.
    """
    header = read_header(blob)
    # Whose chunk it is comes first: another's must not be told apart by what its key does.
    check(header, key, geometry)
    opened = open_blob(blob, header, key_id, cipher)
    if opened is not header:
        # Its tokens could not be seen before.
        header = opened
        check(header, key, geometry)
    verify_payload(blob, header)
    return header
