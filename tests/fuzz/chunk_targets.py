"""Chunks and sparse copies as they come from a disk or an object store."""

from __future__ import annotations

import struct
from collections.abc import Callable

import xxhash

from services.storage import chunk_format
from services.storage.backends import ChunkKey
from services.storage.chunk_reading import verify_chunk
from services.storage.sparse import format as sparse_format
from services.storage.sparse.verification import verify_copy
from shared.errors import ConfigError, IntegrityError
from shared.ids import key_digest
from shared.messages.pools import KvGeometry
from tests.chunk_makers import SMALL, SMALL_HIDDEN, make_chain
from tests.fuzz.targets import Target
from tests.unit.storage.sparse.made_copies import CIPHER, GEOMETRY, LAYOUT, copy_key, copy_of

Decode = Callable[[bytes], object]

_CHECKSUM = struct.Struct("<Q")
_BODY_CHECKSUM_AT, _HEAD_CHECKSUM_AT, _FLAGS_AT = 240, 248, 24


def chunk_targets() -> list[Target]:
    """The chunk reader over KV and hidden states, and the reader of sparse copies, plain and sealed."""
    made = []
    for name, geometry in (("chunk.kv", SMALL), ("chunk.hidden", SMALL_HIDDEN)):
        chunk = make_chain(1, seed=3, geometry=geometry)[0]
        made.append(
            Target(
                name,
                _both(_chunk_reader(chunk.key, geometry), _chunk_head),
                (IntegrityError,),
                (bytes(chunk.blob),),
                _reseal,
                weight=12,
            )
        )
    chunk = make_chain(1, seed=4, geometry=GEOMETRY)[0]
    for name, key_id in (("sparse.plain", ""), ("sparse.sealed", key_digest("alice"))):
        made.append(
            Target(
                name,
                _both(_sparse_reader(copy_key(chunk), key_id), _sparse_head),
                (IntegrityError, ConfigError),
                (bytes(copy_of(chunk, key_id=key_id)),),
                _reseal,
                weight=6,
            )
        )
    return made


def _chunk_reader(key: ChunkKey, geometry: KvGeometry) -> Decode:
    return lambda data: verify_chunk(_buffer(data), key, geometry)


def _sparse_reader(key: ChunkKey, key_id: str) -> Decode:
    return lambda data: verify_copy(_buffer(data), key, LAYOUT, cipher=CIPHER, key_id=key_id)


def _both(*readers: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """All readers, whichever of them refuses first."""

    def decode(data: bytes) -> None:
        for reader in readers:
            try:
                reader(data)
            except (IntegrityError, ConfigError):
                continue

    return decode


def _chunk_head(data: bytes) -> None:
    chunk_format.read_fixed(memoryview(data)[:4096], len(data))


def _sparse_head(data: bytes) -> None:
    sparse_format.read_fixed(memoryview(data)[:4096], len(data))


def _buffer(data: bytes) -> memoryview:
    """Bytes as a tier reads them: writable, because sealed blobs are opened where they lie."""
    return memoryview(bytearray(data))


def _reseal(data: bytearray) -> None:
    """Both checksums of the fixed header, as if whoever changed it had written it. Both formats have them there."""
    if len(data) < chunk_format.FIXED_BYTES:
        return
    header_bytes, is_sealed = struct.unpack_from("<I", data, 12)[0], data[_FLAGS_AT] & chunk_format.IS_SEALED
    end = len(data) if is_sealed and data.startswith(chunk_format.MAGIC) else min(len(data), header_bytes)
    body = bytes(data[chunk_format.FIXED_BYTES : end])
    _CHECKSUM.pack_into(data, _BODY_CHECKSUM_AT, xxhash.xxh3_64_intdigest(body))
    _CHECKSUM.pack_into(data, _HEAD_CHECKSUM_AT, xxhash.xxh3_64_intdigest(bytes(data[:_HEAD_CHECKSUM_AT])))
