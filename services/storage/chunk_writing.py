"""Making of one chunk from the pools: a blob that may leave this process. Blocking: for I/O threads."""

from __future__ import annotations

import xxhash

from services.storage.chunk_format import ChunkHeader, check, write_header
from services.storage.chunk_gathering import gather_chunk
from services.storage.chunk_sealing import Cipher, seal_blob
from services.storage.core.save_check import SaveChunk
from shared.memory import HostPoolView
from shared.memory.device_pool_view import DevicePages


def gather_blob(
    chunk: SaveChunk, namespace: str, depth: int, blob: memoryview, host: HostPoolView, device: DevicePages | None
) -> ChunkHeader:
    """Make ``blob`` the chunk, not sealed yet; return its header. Its pools are not needed any more then.

    Raises IntegrityError when the pages do not hold what the order says, or its tokens are not those of its name;
    InvalidRequest when the order makes no chunk; TransportError when the device pool cannot be read.
    """
    checksums = gather_chunk(chunk, blob, host, device)
    header = write_header(
        blob,
        namespace=namespace,
        geometry=host.geometry,
        depth=depth,
        parent=chunk.parent,
        tokens=chunk.tokens,
        checksums=checksums,
    )
    check(header, chunk.key, host.geometry)
    return header


def seal(blob: memoryview, header: ChunkHeader, key_id: str, cipher: Cipher) -> None:
    """Encrypt the blob in place, unless ``key_id`` is "". Raises KeyMissing."""
    if key_id:
        seal_blob(blob, header, key_id, cipher)


def seal_for_upload(blob: memoryview, header: ChunkHeader, key_id: str, cipher: Cipher) -> int:
    """Seal the blob; return the :func:`blob_digest` by which an upload recognises it."""
    seal(blob, header, key_id, cipher)
    return blob_digest(blob)


def blob_digest(blob: memoryview) -> int:
    """Return a digest that tells whether a blob that is read again is the one that was written."""
    return int(xxhash.xxh3_64_intdigest(blob))
