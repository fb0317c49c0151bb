"""What lies at rest of a sealed chunk confirms nobody's guess of its tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.storage.backends import ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.backends.heat_file import pack_heats
from services.storage.chunk_format import fixed_fields, payload_view, write_fixed, write_header
from services.storage.chunk_names import ChunkNames
from services.storage.chunk_payload import hash_payload
from services.storage.chunk_reading import verify_chunk
from services.storage.chunk_sealing import seal_blob
from services.storage.cipher import Cipher
from services.storage.key_ring import KeyRing
from services.storage.keys import DEFAULT_KEY_ID
from shared.errors import KeyMissing
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages, chain_root, key_digest
from tests.chunk_makers import SMALL, MadeChunk, aligned, make_chain
from tests.unit.storage.made_ciphers import encoded, make_cipher
from tests.unit.storage.sparse.made_copies import CIPHER as SPARSE_CIPHER
from tests.unit.storage.sparse.made_copies import LAYOUT, copy_of

PIN_DIGITS = 4
TIMEOUT_S = 10.0
ALICE = key_digest("alice")


def _names(cipher: Cipher, namespace: str) -> ChunkNames:
    names = ChunkNames(cipher)
    names.learn(namespace, DEFAULT_KEY_ID)
    return names


def _sealed(chunk: MadeChunk, cipher: Cipher) -> memoryview:
    seal_blob(chunk.blob, chunk.header, DEFAULT_KEY_ID, cipher)
    return chunk.blob


def _of_tokens(namespace: str, tokens: bytes) -> MadeChunk:
    """A chunk of zeros below the root whose tokens these are."""
    parent, blob = chain_root(namespace), aligned(make_chain(1, seed=0)[0].blob.nbytes)
    identities = chain_pages(parent, tokens, SMALL.page_size * TOKEN_BYTES)
    checksums = hash_payload(payload_view(blob, SMALL), SMALL, identities)
    header = write_header(
        blob, namespace=namespace, geometry=SMALL, depth=0, parent=parent, tokens=tokens, checksums=checksums
    )
    return MadeChunk(header, blob)


def _guesses(tokens: bytes) -> list[bytes]:
    """The tokens with each PIN as their last four."""
    known = np.frombuffer(tokens, np.int32)[:-PIN_DIGITS]
    digits = np.array(list(np.ndindex(*(10,) * PIN_DIGITS)), np.int32)
    return [np.concatenate([known, pin]).astype("<i4").tobytes() for pin in digits]


def _guessed(folder: Path, namespace: str, tokens: bytes, *others: bytes) -> list[bytes]:
    """Which guesses the names and bytes of files in ``folder``, and ``others``, confirm."""
    files = list(folder.rglob("*.chunk"))
    seen = b"".join([*(file.read_bytes() for file in files), *others])
    paths = " ".join(str(file) for file in files)
    assert files
    ends = {
        guess: chain_pages(chain_root(namespace), guess, SMALL.page_size * TOKEN_BYTES)[-DIGEST_BYTES:]
        for guess in _guesses(tokens)
    }
    return [guess for guess, end in ends.items() if end in seen or end.hex() in paths]


def test_a_pin_is_not_recovered_from_what_lies_at_rest(tmp_path: Path) -> None:
    """Who knows the namespace and all of a prompt but a PIN, and reads names and headers, cannot tell which PIN it was,
    neither by the chunk itself nor by the one below. Of a chunk that is not sealed this tells it.
    """
    cipher, namespace = make_cipher(default=1), make_chain(1, seed=1)[0].key.namespace
    tokens = np.arange(64, dtype="<i4")
    tokens[-PIN_DIGITS:] = 4, 7, 1, 1
    prompt = tokens.tobytes()
    chunk = _of_tokens(namespace, prompt)
    for folder, names in (("plain", ChunkNames()), ("sealed", _names(cipher, namespace))):
        (tmp_path / folder).mkdir()
        sealed = chunk.header
        if folder == "sealed":
            sealed = seal_blob(chunk.blob, chunk.header, DEFAULT_KEY_ID, cipher)
        backend = DiskBackend([str(tmp_path / folder)], names=names)
        backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=TIMEOUT_S)
        backend.close()
    below = msgspec.structs.replace(sealed, depth=64, parent=cipher.hide(DEFAULT_KEY_ID, chunk.key.identity))

    assert _guessed(tmp_path / "plain", namespace, prompt) == [prompt]
    assert _guessed(tmp_path / "sealed", namespace, prompt, fixed_fields(below)) == []


def test_a_sparse_copy_tells_no_more_than_its_chunk() -> None:
    """Its header holds no identity either."""
    (chunk,) = make_chain(1, seed=3, geometry=LAYOUT.geometry)

    blob = bytes(copy_of(chunk, key_id=ALICE))

    assert chunk.key.identity not in blob
    assert SPARSE_CIPHER.hide(ALICE, chunk.key.identity) in blob


def test_a_sealed_chunk_is_found_again_by_its_key_alone(tmp_path: Path) -> None:
    """After a restart the inventory speaks in the cell's names, and what is read is the chunk."""
    cipher = make_cipher(default=1)
    chunks = make_chain(2, seed=2)
    namespace = chunks[0].key.namespace
    backend = DiskBackend([str(tmp_path)], names=_names(cipher, namespace))
    for chunk in chunks:
        backend.put(chunk.key, _sealed(chunk, cipher), stripe=0, timeout_s=TIMEOUT_S)
    backend.close()

    again = DiskBackend([str(tmp_path)], names=ChunkNames(cipher))  # No order has named the key yet.
    listed = list(again.entries())
    into = aligned(chunks[0].blob.nbytes)
    read = again.get(chunks[1].key, into, timeout_s=TIMEOUT_S)
    header = verify_chunk(into, chunks[1].key, SMALL, cipher=cipher, key_id=DEFAULT_KEY_ID)

    assert {entry.key: entry.nbytes for entry in listed} == {chunk.key: chunk.blob.nbytes for chunk in chunks}
    assert {entry.key: (entry.place, entry.parent) for entry in listed} == {
        chunks[0].key: (0, None),
        chunks[1].key: (1, chunks[0].key),
    }
    assert (read, header.key, header.parent) == (into.nbytes, chunks[1].key, chunks[0].key.identity)
    again.close()


def test_what_chunks_were_worth_is_noted_under_names_at_rest(tmp_path: Path) -> None:
    """The file of heats confirms no guess either, and is understood after a restart."""
    cipher = make_cipher(default=1)
    (chunk,) = make_chain(1, seed=10)
    backend = DiskBackend([str(tmp_path)], names=_names(cipher, chunk.key.namespace))
    backend.put(chunk.key, _sealed(chunk, cipher), stripe=0, timeout_s=TIMEOUT_S)
    backend.keep_heats(str(tmp_path), {chunk.key: 3.0})
    backend.close()

    again = DiskBackend([str(tmp_path)], names=ChunkNames(cipher))
    (entry,) = again.entries()
    plain = pack_heats({chunk.key: 3.0})[-10:-2]  # The name of the only one.
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]

    assert (entry.key, entry.heat) == (chunk.key, 3.0)
    assert any(pack_heats({})[:8] in data for data in files)
    assert not any(plain in data for data in files)
    again.close()


def test_what_lacks_its_key_counts_and_can_be_deleted(tmp_path: Path) -> None:
    """Without keys a sealed chunk has no name in the cell, and neither its bytes nor its file are lost sight of."""
    cipher = make_cipher(default=1)
    (chunk,) = make_chain(1, seed=4)
    names = _names(cipher, chunk.key.namespace)
    backend = DiskBackend([str(tmp_path)], names=names)
    backend.put(chunk.key, _sealed(chunk, cipher), stripe=0, timeout_s=TIMEOUT_S)
    backend.close()

    without = DiskBackend([str(tmp_path)])
    (entry,) = without.entries()
    found = without.get(chunk.key, aligned(entry.nbytes), timeout_s=TIMEOUT_S)
    is_deleted = without.delete(entry.key, timeout_s=TIMEOUT_S)

    assert (entry.key, entry.nbytes) == (names.at_rest(chunk.key), chunk.blob.nbytes)
    assert (found, is_deleted, list(tmp_path.rglob("*.chunk"))) == (0, True, [])
    without.close()


def test_a_chunk_whose_key_was_exchanged_can_still_be_deleted(tmp_path: Path) -> None:
    """A running storage remembers under which name it wrote it."""
    file = tmp_path / "keys.toml"
    (tmp_path / "disk").mkdir()
    ring = _key_file(file, 1)
    cipher = Cipher(ring, clock=lambda: 0.0)
    (chunk,) = make_chain(1, seed=5)
    backend = DiskBackend([str(tmp_path / "disk")], names=_names(cipher, chunk.key.namespace))
    backend.put(chunk.key, _sealed(chunk, cipher), stripe=0, timeout_s=TIMEOUT_S)
    _key_file(file, 2)
    cipher.reload()

    assert backend.delete(chunk.key, timeout_s=TIMEOUT_S)
    assert not list(tmp_path.rglob("*.chunk"))
    backend.close()


def _key_file(file: Path, number: int) -> KeyRing:
    file.write_text(f'default = "{encoded(number)}"')
    file.chmod(0o600)
    return KeyRing(str(file), environ={}, now_s=0.0)


def test_a_name_of_an_earlier_release_is_deleted_at_the_start(tmp_path: Path) -> None:
    """A chunk that was sealed under the digest of its tokens is not kept, not even aside; others are."""
    cipher = make_cipher(default=1)
    old, plain = make_chain(2, seed=6)
    sealed = seal_blob(old.blob, old.header, DEFAULT_KEY_ID, cipher)
    header = msgspec.structs.replace(sealed, version=1, identity=old.key.identity, parent=old.header.parent)
    write_fixed(old.blob, header)
    backend = DiskBackend([str(tmp_path)])
    for chunk in (old, plain):
        backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=TIMEOUT_S)
    backend.close()

    again = DiskBackend([str(tmp_path)], names=ChunkNames(cipher))
    listed = [entry.key for entry in again.entries()]

    assert listed == [plain.key]
    assert not [file for file in tmp_path.rglob("*") if old.key.identity.hex() in file.name]
    again.close()


def test_names_need_a_key() -> None:
    """Of a namespace that nobody has ordered of, there is no name at rest; without a cipher names are the same."""
    (chunk,) = make_chain(1, seed=7)

    with pytest.raises(KeyMissing):
        ChunkNames(make_cipher(default=1)).at_rest(chunk.key)
    assert ChunkNames().at_rest(chunk.key) == chunk.key


def test_another_key_gives_another_name_and_the_same_key_the_same() -> None:
    """Nodes that share a store and a key share chunks; nobody else finds them."""
    (chunk,) = make_chain(1, seed=8)
    namespace = chunk.key.namespace
    mine, same, other = (_names(make_cipher(default=number), namespace) for number in (1, 1, 2))

    assert mine.at_rest(chunk.key) == same.at_rest(chunk.key) != other.at_rest(chunk.key)
    assert mine.in_cell(same.at_rest(chunk.key)) == chunk.key
    assert mine.at_rest(mine.at_rest(chunk.key)) == mine.at_rest(chunk.key)


def test_a_sealed_name_is_parsed_and_never_equals_a_plain_one() -> None:
    """``.sealed`` is part of the name."""
    (chunk,) = make_chain(1, seed=9)
    name = _names(make_cipher(default=1), chunk.key.namespace).at_rest(chunk.key)

    assert ChunkKey.parse(name.path) == name
    assert name.path.endswith(".sealed")
    assert ChunkKey.parse(name.path.removesuffix(".sealed")) != name
