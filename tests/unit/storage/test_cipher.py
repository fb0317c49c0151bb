"""Chunks sealed under tenants' keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from services.storage import measures
from services.storage.cipher import NONCE_BYTES, open_cipher
from services.storage.config import DEFAULT_KEY_VARIABLE, StorageConfig
from shared.errors import ConfigError, IntegrityError, KeyMissing, OperatorError
from shared.ids import key_digest
from tests.unit.storage.made_ciphers import encoded, make_cipher

ALICE, BOB = key_digest("alice"), key_digest("bob")


@given(plaintext=st.binary(max_size=300), aad=st.binary(max_size=300))
def test_what_is_sealed_can_be_opened(plaintext: bytes, aad: bytes) -> None:
    """Whatever the chunk, it comes back, and sealing adds 28 bytes."""
    cipher = make_cipher(alice=1)

    sealed = cipher.seal(ALICE, memoryview(plaintext), aad)

    assert len(sealed) == NONCE_BYTES + len(plaintext) + 16
    assert cipher.open(ALICE, memoryview(sealed), aad) == plaintext


def test_every_changed_bit_is_noticed() -> None:
    """Nonce, ciphertext, tag and authenticated data: a change of any byte is wrong_key."""
    cipher, aad = make_cipher(alice=1), b"header"
    sealed = cipher.seal(ALICE, memoryview(b"plaintext"), aad)
    faults = [(bytes(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :]), aad) for i in range(len(sealed))]

    for changed, data in [*faults, (sealed, b"Header"), (sealed[:-1], aad), (sealed[:20], aad), (b"", aad)]:
        with pytest.raises(IntegrityError) as raised:
            cipher.open(ALICE, memoryview(changed), data)
        assert raised.value.code == "wrong_key"


def test_another_tenants_key_does_not_open_it() -> None:
    """Nor does a new key of the same tenant."""
    sealed = make_cipher(alice=1, bob=2).seal(ALICE, memoryview(b"plaintext"), b"")

    with pytest.raises(IntegrityError, match="not sealed with this key"):
        make_cipher(alice=1, bob=2).open(BOB, memoryview(sealed), b"")
    with pytest.raises(IntegrityError, match="not sealed with this key"):
        make_cipher(alice=3).open(ALICE, memoryview(sealed), b"")


def test_without_a_key_nothing_is_sealed_or_opened() -> None:
    """Both are KeyMissing, an error of the operator, and counted."""
    cipher = make_cipher(alice=1)
    refusals = [measures.CIPHER_REFUSALS.labels(operation, "key_missing") for operation in ("seal", "open")]
    before = [refusal._value.get() for refusal in refusals]

    with pytest.raises(KeyMissing):
        cipher.seal(BOB, memoryview(b"plaintext"), b"")
    with pytest.raises(OperatorError):
        cipher.open(BOB, memoryview(bytes(40)), b"")

    assert [refusal._value.get() for refusal in refusals] == [count + 1 for count in before]


def test_nonces_are_fresh() -> None:
    """The same chunk sealed twice shows nothing in common."""
    cipher = make_cipher(alice=1)

    first, second = (cipher.seal(ALICE, memoryview(bytes(64)), b"name") for _ in range(2))

    assert first[:NONCE_BYTES] != second[:NONCE_BYTES]
    assert first[NONCE_BYTES:] != second[NONCE_BYTES:]


def test_each_chunk_has_a_key_of_its_own() -> None:
    """One nonce for two chunks gives unrelated key streams, and neither is under the tenant's key itself."""
    nonce, cipher = bytes(NONCE_BYTES), make_cipher(alice=1, nonces=bytes)

    streams = [cipher.seal(ALICE, memoryview(bytes(64)), name)[NONCE_BYTES:-16] for name in (b"a", b"b")]

    plain_gcm = AESGCM(bytes([1]) * 32).encrypt(nonce, bytes(64), b"a")[:-16]
    assert len({*streams, plain_gcm}) == 3


def test_a_sealed_chunk_is_as_it_always_was() -> None:
    """Key, nonce and data give these bytes for ever: chunks of earlier versions must be readable."""
    cipher = make_cipher(default=1, nonces=lambda size: bytes(range(size)))

    sealed = cipher.seal("", memoryview(b"thermocline"), b"header")

    assert sealed.hex() == "000102030405060708090a0bb1d29ed402d448077486ee8cd21f77327d8c78ab0ff1d81780d7d7"


def test_no_key_is_no_cipher() -> None:
    """Without a file and without the variable chunks stay as they are."""
    assert open_cipher(StorageConfig(), environ={}) is None


def test_the_configured_keys_are_used(tmp_path: Path) -> None:
    """A file, keys in the setting, and the variable alone each make a cipher; faulty ones refuse to start."""
    path = tmp_path / "keys.toml"
    path.write_text(f'default = "{encoded(1)}"')
    path.chmod(0o600)
    made = [
        open_cipher(StorageConfig(keys=str(path)), environ={}),
        open_cipher(StorageConfig(keys=f'default = "{encoded(1)}"'), environ={}),
        open_cipher(StorageConfig(), environ={DEFAULT_KEY_VARIABLE: encoded(1)}),
    ]

    sealed = [cipher.seal("", memoryview(b"x"), b"") for cipher in made if cipher]

    assert len(sealed) == 3
    assert all(cipher and cipher.open("", memoryview(other), b"") == b"x" for cipher in made for other in sealed)
    with pytest.raises(ConfigError):
        open_cipher(StorageConfig(keys=str(tmp_path / "none")), environ={})


def test_deleting_a_tenants_key_makes_its_chunks_unreadable(tmp_path: Path) -> None:
    """They are KeyMissing from then on, and the others open as before."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[salts]\nalice = "{encoded(1)}"\nbob = "{encoded(2)}"')
    path.chmod(0o600)
    cipher = open_cipher(StorageConfig(keys=str(path)), environ={})
    assert cipher is not None
    sealed = {key_id: cipher.seal(key_id, memoryview(b"chunk"), b"") for key_id in (ALICE, BOB)}

    path.write_text(f'[salts]\nbob = "{encoded(2)}"')
    cipher.reload()

    with pytest.raises(KeyMissing):
        cipher.open(ALICE, memoryview(sealed[ALICE]), b"")
    assert cipher.open(BOB, memoryview(sealed[BOB]), b"") == b"chunk"
