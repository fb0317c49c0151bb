"""Sealed blobs: nothing of the tokens and KV to be seen, and nothing to be changed unnoticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.storage.chunk_format import FIXED_BYTES, blob_nbytes, payload_view, read_header
from services.storage.chunk_payload import verify_payload
from services.storage.chunk_reading import verify_chunk
from services.storage.chunk_sealing import open_blob, seal_blob
from shared.errors import ConfigError, IntegrityError, InvalidRequest
from shared.ids import key_digest
from shared.messages.pools import KvGeometry
from tests.chunk_makers import HIDDEN_GEOMETRIES, SMALL, make_chain
from tests.unit.storage.made_ciphers import make_cipher

MINE, THEIRS = key_digest("mine"), key_digest("theirs")
TIGHT = KvGeometry(layers=80, kv_heads=1, head_dim=1, page_size=1, dtype="float16")
"""Its tables are larger than a block."""


CIPHER = make_cipher(mine=1, theirs=2)


@pytest.mark.parametrize("geometry", [SMALL, TIGHT, *HIDDEN_GEOMETRIES.values()], ids=str)
def test_a_sealed_blob_opens_to_the_same_chunk(geometry: KvGeometry) -> None:
    """Sealing and opening where it lies gives back every byte; the size is the same in between."""
    for chunk in make_chain(2, seed=1, geometry=geometry):
        plain = bytes(chunk.blob)

        sealed_header = seal_blob(chunk.blob, chunk.header, MINE, CIPHER)

        assert read_header(chunk.blob) == sealed_header
        assert (sealed_header.is_sealed, sealed_header.key_id, sealed_header.tokens) == (True, MINE, b"")
        assert sealed_header.key == replace(chunk.key, identity=CIPHER.hide(MINE, chunk.key.identity), is_sealed=True)
        assert sealed_header.nbytes == blob_nbytes(geometry)
        header = verify_chunk(chunk.blob, chunk.key, geometry, cipher=CIPHER, key_id=MINE)
        assert header == chunk.header
        assert np.array_equal(header.checksums, chunk.header.checksums)
        assert bytes(chunk.blob) == plain


def test_nothing_of_the_plaintext_is_left() -> None:
    """No run of 8 bytes of tokens, checksums or KV is anywhere in the sealed blob."""
    chunk = make_chain(1, seed=2)[0]
    secret = chunk.header.tokens + chunk.header.checksums.tobytes() + bytes(payload_view(chunk.blob, SMALL))

    seal_blob(chunk.blob, chunk.header, MINE, CIPHER)

    sealed = bytes(chunk.blob)
    assert not any(secret[at : at + 8] in sealed for at in range(0, len(secret) - 8, 8))


def test_another_key_does_not_open_it() -> None:
    """Whether the header names another key, or names this one but was sealed with another, it is ``wrong_key``."""
    chunk = make_chain(1, seed=3)[0]
    header = seal_blob(chunk.blob, chunk.header, MINE, CIPHER)
    sealed = bytes(chunk.blob)

    for key_id, cipher in ((THEIRS, CIPHER), ("", CIPHER), (MINE, make_cipher(mine=2))):
        with pytest.raises(IntegrityError) as caught:
            open_blob(chunk.blob, header, key_id, cipher)
        assert caught.value.code == "wrong_key"
    assert bytes(chunk.blob) == sealed


def test_a_plain_chunk_cannot_pass_for_a_sealed_one() -> None:
    """Who has a key accepts nothing that was not sealed with it."""
    chunk = make_chain(1, seed=4)[0]

    with pytest.raises(IntegrityError) as caught:
        verify_chunk(chunk.blob, chunk.key, SMALL, cipher=CIPHER, key_id=MINE)

    assert caught.value.code == "wrong_key"


def test_a_missing_key_is_the_operators_fault() -> None:
    """Neither sealing nor opening goes on without the key, and the blob stays as it was."""
    chunk = make_chain(1, seed=5)[0]
    plain = bytes(chunk.blob)

    with pytest.raises(ConfigError):
        seal_blob(chunk.blob, chunk.header, MINE, make_cipher(theirs=2))

    assert bytes(chunk.blob) == plain
    header = seal_blob(chunk.blob, chunk.header, MINE, CIPHER)
    with pytest.raises(ConfigError):
        open_blob(chunk.blob, header, MINE, make_cipher(theirs=2))
    with pytest.raises(ConfigError, match="--keys"):
        open_blob(chunk.blob, header, MINE, None)


@pytest.mark.parametrize("key_id", ["", "k" * 33, "schlüssel", "a\0b"])
def test_key_ids_are_short_ascii(key_id: str) -> None:
    """What the header could not name is refused."""
    chunk = make_chain(1, seed=6)[0]

    with pytest.raises(InvalidRequest):
        seal_blob(chunk.blob, chunk.header, key_id, CIPHER)


def test_damage_of_a_sealed_blob_is_seen_without_the_key() -> None:
    """Any flipped bit behind the fixed header is ``wrong_checksum`` on reading, before any key is asked for."""
    chunk = make_chain(1, seed=7)[0]
    seal_blob(chunk.blob, chunk.header, MINE, CIPHER)

    for at in range(FIXED_BYTES, chunk.blob.nbytes, 61):
        chunk.blob[at] ^= 16
        with pytest.raises(IntegrityError) as caught:
            read_header(chunk.blob)
        assert caught.value.code == "wrong_checksum"
        chunk.blob[at] ^= 16


def test_a_sealed_blob_cannot_be_verified_or_sealed_again() -> None:
    """What is sealed must be opened first."""
    chunk = make_chain(1, seed=8)[0]
    header = seal_blob(chunk.blob, chunk.header, MINE, CIPHER)

    with pytest.raises(IntegrityError) as caught:
        verify_payload(chunk.blob, header)
    assert caught.value.code == "sealed"
    with pytest.raises(InvalidRequest):
        seal_blob(chunk.blob, header, MINE, CIPHER)
