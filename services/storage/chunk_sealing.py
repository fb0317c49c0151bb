"""Sealing of blobs: the same chunk, but only with the key can its tokens and KV be read, or changed unnoticed.

The sealed part is one piece of the blob, the tables and the payload; it is replaced by nonce, ciphertext and tag from
byte 256 on. The fixed header stays readable, so that an inventory needs no key, and is authenticated with the rest: a
sealed chunk cannot pass for another. The identities in it, which are digests of tokens, are hidden.
``docs/reference/chunk-format.md`` documents what it reveals to a reader of the disk.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from services.storage.chunk_format import (
    FIXED_BYTES,
    MAX_KEY_ID_BYTES,
    PLAIN_VERSION,
    SEALED_VERSION,
    SEALING_BYTES,
    ChunkHeader,
    fixed_fields,
    read_header,
    table_nbytes,
    write_fixed,
)
from shared.errors import ConfigError, IntegrityError, InvalidRequest


class Cipher(Protocol):
    """Authenticated encryption under named keys."""

    def seal(self, key_id: str, plaintext: memoryview, aad: bytes) -> bytes:
        """Return nonce, ciphertext and tag. Raises ConfigError when there is no such key."""

    def open(self, key_id: str, sealed: memoryview, aad: bytes) -> bytes:
        """Return the plaintext. Raises IntegrityError(code="wrong_key"), or ConfigError when there is no such key."""

    def hide(self, key_id: str, identity: bytes) -> bytes:
        """Return other 16 bytes for an identity, the same each time. Raises ConfigError when there is no such key."""

    def show(self, key_id: str, hidden: bytes) -> bytes:
        """Return the identity that :meth:`hide` was given. Raises ConfigError when there is no such key."""


def seal_blob(blob: memoryview, header: ChunkHeader, key_id: str, cipher: Cipher) -> ChunkHeader:
    """Encrypt an unsealed blob in place; return its new header. Its size does not change.

    ``blob`` and ``header`` are those of ``chunk_format.write_header``. Raises InvalidRequest for an impossible
    ``key_id`` (1 to 32 ASCII characters), and what the cipher raises, with the blob unchanged.
    """
    if header.is_sealed or not key_id.isascii() or not 1 <= len(key_id) <= MAX_KEY_ID_BYTES or "\0" in key_id:
        raise InvalidRequest(f"chunk {header.identity.hex()} cannot be sealed with key {key_id!r}")
    sealed_header = msgspec.structs.replace(
        header,
        version=SEALED_VERSION,
        identity=cipher.hide(key_id, header.identity),
        parent=cipher.hide(key_id, header.parent),
        key_id=key_id,
        tokens=b"",
        identities=b"",
        checksum_table=b"",
    )
    start, end = _sealed_piece(header)
    sealed = cipher.seal(key_id, blob[start:end], fixed_fields(sealed_header))
    sealed_end = FIXED_BYTES + len(sealed)
    blob[FIXED_BYTES:sealed_end] = sealed
    # The plaintext's end lies behind that, and must be overwritten.
    blob[sealed_end:] = bytes(blob.nbytes - sealed_end)
    write_fixed(blob, sealed_header)
    return sealed_header


def open_blob(blob: memoryview, header: ChunkHeader, key_id: str, cipher: Cipher | None) -> ChunkHeader:
    """Decrypt a sealed blob in place, so that it can be verified; return the whole header, tables included.

    ``key_id`` names the key that the caller may use: IntegrityError(code="wrong_key") when the chunk is sealed with
    another, or was changed. A blob that is not sealed is accepted only for the key_id "", so that no plain chunk can
    take the place of a sealed one. ConfigError when there is no such key, or no cipher at all.
    """
    if header.key_id != key_id:
        raise IntegrityError(
            f"chunk {header.identity.hex()} is sealed with key {header.key_id or 'none'}, not {key_id or 'none'}",
            code="wrong_key",
        )
    if not header.is_sealed:
        return header
    if cipher is None:
        raise ConfigError(f"there is no encryption key for {key_id}: name a file by --keys")
    start, end = _sealed_piece(header)
    sealed_end = FIXED_BYTES + end - start + SEALING_BYTES
    plaintext = cipher.open(key_id, blob[FIXED_BYTES:sealed_end], fixed_fields(header))
    if len(plaintext) != end - start:
        raise IntegrityError(f"chunk {header.identity.hex()} holds {len(plaintext)} sealed bytes", code="wrong_key")
    blob[FIXED_BYTES:start] = bytes(start - FIXED_BYTES)
    blob[start:end] = plaintext
    write_fixed(blob, _plain(header, cipher))
    return read_header(blob)


def _plain(header: ChunkHeader, cipher: Cipher) -> ChunkHeader:
    """Return the header of the same chunk before it was sealed, still without the tables."""
    identity, parent = header.identity, header.parent
    if header.hides_names:
        identity, parent = (cipher.show(header.key_id, hidden) for hidden in (identity, parent))
    return msgspec.structs.replace(header, version=PLAIN_VERSION, identity=identity, parent=parent, key_id="")


def _sealed_piece(header: ChunkHeader) -> tuple[int, int]:
    """Return the offsets at which the tables begin and the payload ends in an unsealed blob."""
    return header.header_bytes - table_nbytes(header.geometry), header.header_bytes + header.payload_bytes
