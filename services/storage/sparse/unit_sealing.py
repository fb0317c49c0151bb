"""Sealing of sparse copies: every unit on its own, so that it can be opened alone, and the tables as one piece.

A unit's ciphertext lies where the unit would; its nonce and tag are in the tables, and so copies that are sealed and
copies that are not have their units at like places. What is authenticated with each piece is the fixed header and which
piece it is: a unit cannot pass for another, of this copy or any. That it is of this very writing follows from its tag
in the tables. Keys are derived from what is authenticated (``cipher``), so every unit has a key of its own.
"""

from __future__ import annotations

import struct

from services.storage.chunk_format import MAX_KEY_ID_BYTES
from services.storage.chunk_sealing import Cipher
from services.storage.sparse.format import SparseHeader, fixed_fields
from services.storage.sparse.layout import NONCE_BYTES, SEAL_BYTES, TAG_BYTES
from shared.errors import IntegrityError, InvalidRequest

_TABLES = b"tables"
_UNIT = struct.Struct("<4sII")


def check_key_id(key_id: str) -> None:
    """Raise InvalidRequest for what cannot be written in a header: at most 32 ASCII characters, "" is no key."""
    if not key_id.isascii() or len(key_id) > MAX_KEY_ID_BYTES or "\0" in key_id:
        raise InvalidRequest(f"no chunk is sealed with key {key_id!r}")


def seal_tables(packed: bytes, header: SparseHeader, cipher: Cipher) -> bytes:
    """Nonce, ciphertext and tag. Raises KeyMissing."""
    return cipher.seal(header.key_id, memoryview(packed), fixed_fields(header) + _TABLES)


def open_tables(body: memoryview, header: SparseHeader, cipher: Cipher) -> bytes:
    """Parse the packed tables from the bytes behind the fixed header, sealed or not.

    Raises IntegrityError(code="wrong_key"), or KeyMissing.
    """
    layout = header.layout
    if not header.is_sealed:
        return bytes(body[: layout.table_bytes])
    nbytes = layout.table_bytes + layout.seals_bytes
    return cipher.open(header.key_id, body[: nbytes + SEAL_BYTES], fixed_fields(header) + _TABLES)


class UnitSealing:
    """The units of one sealed copy."""

    def __init__(self, header: SparseHeader, cipher: Cipher) -> None:
        """Take the key and the authenticated fields from ``header``, that of a sealed copy."""
        self._fixed = fixed_fields(header)
        self._key_id = header.key_id
        self._cipher = cipher

    def seal(self, unit: memoryview, layer: int, number: int) -> bytes:
        """Encrypt a unit where it is; returns its nonce and tag, 28 bytes. Raises KeyMissing."""
        sealed = self._cipher.seal(self._key_id, unit, self._name(layer, number))
        unit[:] = sealed[NONCE_BYTES:-TAG_BYTES]
        return sealed[:NONCE_BYTES] + sealed[-TAG_BYTES:]

    def open(self, unit: memoryview, seal: bytes, layer: int, number: int) -> None:
        """Decrypt a unit where it is. Raises IntegrityError(code="wrong_key"), or KeyMissing."""
        sealed = b"".join((seal[:NONCE_BYTES], unit, seal[NONCE_BYTES:]))
        plaintext = self._cipher.open(self._key_id, memoryview(sealed), self._name(layer, number))
        if len(plaintext) != unit.nbytes:
            raise IntegrityError(f"a unit holds {len(plaintext)} sealed bytes", code="wrong_key")
        unit[:] = plaintext

    def _name(self, layer: int, number: int) -> bytes:
        return self._fixed + _UNIT.pack(b"unit", layer, number)
