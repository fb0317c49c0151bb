"""The blob of a chunk: its layout, what it says of itself, and what it refuses."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.chunk_format import (
    FIXED_BYTES,
    MAGIC,
    blob_nbytes,
    check,
    header_nbytes,
    payload_view,
    read_fixed,
    read_header,
    table_nbytes,
    write_header,
)
from services.storage.chunk_payload import verify_payload
from shared.chunks import chunk_bytes, chunk_pages, geometry_id
from shared.errors import IntegrityError, InvalidRequest
from shared.ids import DIGEST_BYTES, chain_root, namespace_digest
from shared.memory.host_pool import layer_checksum
from shared.messages.pools import KvGeometry
from tests.cases import case
from tests.chunk_makers import HIDDEN_GEOMETRIES, SMALL, SMALL_HIDDEN, MadeChunk, make_chain

DEPTH_AT = 32

GEOMETRIES = st.builds(
    KvGeometry,
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 8]),
    page_size=st.sampled_from([1, 3, 16, 32, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
) | st.sampled_from(list(HIDDEN_GEOMETRIES.values()))


def with_fixed(blob: memoryview, offset: int, data: bytes) -> memoryview:
    """A copy whose fixed header was changed by somebody who knows how to make its checksum."""
    changed = bytearray(blob)
    changed[offset : offset + len(data)] = data
    changed[FIXED_BYTES - 8 : FIXED_BYTES] = struct.pack("<Q", xxhash.xxh3_64_intdigest(changed[: FIXED_BYTES - 8]))
    return memoryview(changed)


def write_again(chunk: MadeChunk, blob: memoryview, **change: object) -> None:
    """Write the header of a chunk to another blob."""
    header = chunk.header
    arguments: dict[str, object] = {
        "namespace": header.namespace,
        "geometry": header.geometry,
        "depth": header.depth,
        "parent": header.parent,
        "tokens": header.tokens,
        "checksums": header.checksums,
    }
    write_header(blob, **(arguments | change))  # type: ignore[arg-type]


@settings(max_examples=60)
@given(geometry=GEOMETRIES, seed=st.integers(0, 2**32))
def test_what_is_written_is_read(geometry: KvGeometry, seed: int) -> None:
    """A chunk of any geometry is read as it was written, and verifies."""
    for chunk in make_chain(2, seed=seed, geometry=geometry):
        header = read_header(chunk.blob)

        assert header == chunk.header
        assert np.array_equal(verify_payload(chunk.blob, header), chunk.header.checksums)
        assert header.identities[-DIGEST_BYTES:] == header.identity
        assert read_fixed(chunk.blob[:BLOCK_BYTES], chunk.blob.nbytes).key == header.key
        check(header, chunk.key, geometry)


@settings(max_examples=60)
@given(geometry=GEOMETRIES)
def test_sizes_are_whole_blocks_and_follow_from_the_geometry(geometry: KvGeometry) -> None:
    """Header and blob end on blocks, and there is room for tables, payload and sealing."""
    header, blob = header_nbytes(geometry), blob_nbytes(geometry)

    assert header % BLOCK_BYTES == blob % BLOCK_BYTES == 0
    assert header >= FIXED_BYTES + 28 + table_nbytes(geometry)
    assert header + chunk_bytes(geometry) <= blob < header + chunk_bytes(geometry) + BLOCK_BYTES


def test_the_layout_is_the_documented_one() -> None:
    """Every field of the fixed header and the tables are where the reference says."""
    parent, chunk = make_chain(2, seed=3)
    blob, header = bytes(chunk.blob), chunk.header
    pages, layers = chunk_pages(SMALL.page_size), SMALL.layers

    assert blob[:8] == MAGIC == b"TCKVCHNK"
    assert struct.unpack_from("<IIQIIQII", blob, 8) == (1, 4096, chunk_bytes(SMALL), 0, pages, 64, 0, layers)
    assert struct.unpack_from("<IIII", blob, 48) == (layers, SMALL.kv_heads, SMALL.head_dim, SMALL.page_size)
    assert blob[64:96] == b"float16".ljust(16, b"\0") + b"page_first".ljust(16, b"\0")
    assert blob[96:112] == bytes.fromhex(header.namespace)
    assert blob[112:144] == header.identity + parent.header.identity
    assert blob[144:192] == bytes(32) + b"xxh3_64".ljust(16, b"\0")
    assert blob[192:240] == bytes(48)
    assert struct.unpack_from("<Q", blob, 240) == (xxhash.xxh3_64_intdigest(blob[256:4096]),)
    assert struct.unpack_from("<Q", blob, 248) == (xxhash.xxh3_64_intdigest(blob[:248]),)
    tables = header.tokens + header.checksums.tobytes()
    assert blob[256:4096] == bytes(4096 - 256 - len(tables)) + tables
    assert blob[4096 + chunk_bytes(SMALL) :] == bytes(len(blob) - 4096 - chunk_bytes(SMALL))


@pytest.mark.parametrize(
    ("geometry", "digest"),
    [
        (SMALL, "88c5b2e1d5a29541fa9766e2167afbd8"),
        (
            KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=1, dtype="bfloat16"),
            "3cb81c0a1f6e533b508ff6d09f2bad4c",
        ),
    ],
)
def test_chunks_of_kv_are_what_they_were_before_there_were_hidden_states(geometry: KvGeometry, digest: str) -> None:
    """Byte by byte, so that a disk of an earlier release stays warm."""
    blobs = b"".join(bytes(chunk.blob) for chunk in make_chain(2, seed=3, geometry=geometry))

    assert hashlib.blake2b(blobs, digest_size=16).hexdigest() == digest


def test_a_hidden_chunk_says_what_its_pages_have() -> None:
    """Which layers have nothing, hidden states or KV, and a checksum for each unit, is where the reference says."""
    chunk = make_chain(2, seed=3, geometry=SMALL_HIDDEN)[1]
    blob, payload = bytes(chunk.blob), chunk_bytes(SMALL_HIDDEN)
    units, unit_bytes = 2 + 2, 16 * 4 * 2

    assert payload == 4 * units * unit_bytes
    assert struct.unpack_from("<IIQIIQII", blob, 8) == (1, 4096, payload, 0, 4, 64, 1, 4)
    assert struct.unpack_from("<II", blob, 192) == (4, 2)
    assert blob[200:240] == bytes(40)
    assert chunk.header.checksums.shape == (4, units)
    identity = chunk.header.identities[16:32]
    for unit in range(units):
        start = 4096 + (units + unit) * unit_bytes
        expected = layer_checksum(memoryview(blob)[start : start + unit_bytes], identity)
        assert chunk.header.checksums[1, unit] == expected
    assert blob[4096 - 8 * 4 * units : 4096] == chunk.header.checksums.tobytes()


def test_equal_kv_makes_equal_blobs() -> None:
    """Nothing in a blob is of the time or the buffer it was written in."""
    chunk = make_chain(1, seed=4)[0]
    again = memoryview(bytearray(b"\xee" * chunk.blob.nbytes))
    payload_view(again, SMALL)[:] = payload_view(chunk.blob, SMALL)

    write_again(chunk, again)

    assert again == chunk.blob


@pytest.mark.parametrize(
    ("offset", "data", "code"),
    [
        (0, b"X", "not_a_chunk"),
        (8, b"\x02", "wrong_layout"),  # Of what is sealed.
        (8, b"\x03", "unknown_version"),
        (12, struct.pack("<I", 8192), "wrong_layout"),
        (16, struct.pack("<Q", 1), "wrong_layout"),
        (24, b"\x01", "wrong_layout"),
        (24, b"\x02", "wrong_layout"),
        (28, struct.pack("<I", 3), "wrong_layout"),
        (40, struct.pack("<II", 1, 2), "wrong_layout"),
        (48, bytes(4), "wrong_layout"),
        (64, b"int8\0\0\0\0", "wrong_layout"),
        (64, b"\xff", "wrong_layout"),
        (144, b"key", "wrong_layout"),
        (176, b"md5\0\0\0\0", "wrong_layout"),
        (200, b"\x01", "wrong_layout"),
        (240, bytes(8), "header_checksum"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(offset: int, data: bytes, code: str) -> None:
    """Fields that do not go together are told from damage, although the checksum is right."""
    blob = with_fixed(make_chain(1, seed=6)[0].blob, offset, data)

    with pytest.raises(IntegrityError) as caught:
        read_header(blob)

    assert caught.value.code == code


@pytest.mark.parametrize(
    ("offset", "fields"),
    [
        (40, (2**32 - 1,)),  # More layers without anything than there are.
        (44, (9,)),  # Another end of layers.
        (192, (0, 1)),  # Hidden states without a width.
        (192, (7, 0)),  # A width without hidden states.
        (192, (7, 2)),  # Hidden states of another width.
        (192, (8, 100)),  # More layers of hidden states than there are.
        (192, (2**32 - 1, 2**32 - 1)),
        (200, (1,)),  # Something where there is nothing.
        (236, (1,)),
    ],
)
def test_an_impossible_form_is_refused(offset: int, fields: tuple[int, ...]) -> None:
    """Layers that do not add up, or sizes that are not those of the form, are no chunk of KV or hidden states."""
    for geometry in (SMALL, *HIDDEN_GEOMETRIES.values()):
        chunk = make_chain(1, seed=6, geometry=geometry)[0]
        blob = with_fixed(chunk.blob, offset, struct.pack(f"<{len(fields)}I", *fields))

        with case(geometry=geometry), pytest.raises(IntegrityError) as caught:
            read_header(blob)

        assert caught.value.code == "wrong_layout"


def test_another_layout_than_ours_is_refused_by_the_check() -> None:
    """A layout of which this release knows nothing is a chunk, but not one that it can use."""
    chunk = make_chain(1, seed=6)[0]
    header = read_header(with_fixed(chunk.blob, 80, b"layer_last"))

    with pytest.raises(IntegrityError) as caught:
        check(header, chunk.key, SMALL)

    assert caught.value.code == "wrong_layout"


def test_the_check_tells_what_is_wrong() -> None:
    """Each way of being another chunk than the one that was asked for has its code."""
    first, second = make_chain(2, seed=7)
    header = read_header(second.blob)
    other = KvGeometry(layers=3, kv_heads=1, head_dim=2, page_size=16, dtype="float16")
    floats = KvGeometry(layers=2, kv_heads=1, head_dim=2, page_size=16, dtype="bfloat16")
    namespace = namespace_digest("another model")
    cases = {
        "wrong_namespace": (ChunkKey(namespace, second.key.geometry, second.key.identity), SMALL),
        "wrong_identity": (first.key, SMALL),
        "wrong_geometry": (ChunkKey(second.key.namespace, geometry_id(other), second.key.identity), other),
        "wrong_dtype": (ChunkKey(second.key.namespace, geometry_id(floats), second.key.identity), floats),
    }

    for code, (key, geometry) in cases.items():
        with pytest.raises(IntegrityError) as caught:
            check(header, key, geometry)
        assert caught.value.code == code


def test_tokens_must_lead_to_the_identity() -> None:
    """A header whose tokens or parent are not those of its name is refused, whoever wrote it."""
    chunk = make_chain(2, seed=8)[1]
    for parent in (bytes(16), chain_root(chunk.header.namespace)):
        header = read_header(with_fixed(chunk.blob, 128, parent))

        with pytest.raises(IntegrityError) as caught:
            check(header, chunk.key, SMALL)

        assert caught.value.code == "wrong_tokens"


def test_a_place_that_is_none_on_the_chain_is_refused() -> None:
    """The namespace's root is above depth 0 and above no other; a sealed header, whose tokens are unseen, as well."""
    first, second = make_chain(2, seed=8)
    deeper = read_fixed(with_fixed(first.blob, DEPTH_AT, struct.pack("<Q", 64))[:FIXED_BYTES], first.blob.nbytes)
    risen = read_fixed(with_fixed(second.blob, DEPTH_AT, struct.pack("<Q", 0))[:FIXED_BYTES], second.blob.nbytes)

    for chunk, header in ((first, deeper), (second, risen)):
        with pytest.raises(IntegrityError, match="a place on the chain"):
            check(msgspec.structs.replace(header, key_id="some"), chunk.key, SMALL)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"tokens": bytes(4)}, "bytes of tokens"),
        ({"checksums": np.zeros((1, 1), np.uint64)}, "checksums of shape"),
        ({"parent": bytes(3)}, "a parent of 3 bytes"),
        ({"depth": 65}, "not on the grid"),
        ({"depth": -64}, "not on the grid"),
        ({"depth": -64, "parent": bytes(16)}, "not on the grid"),
        ({"depth": 64}, "but parent"),
        ({"parent": bytes(16)}, "but parent"),
        ({}, "a blob of 12288 bytes is not 8192"),
        ({"geometry": msgspec.structs.replace(SMALL, hidden=3, from_hidden=1)}, "as wide as K"),
    ],
)
def test_what_makes_no_chunk_is_not_written(wrong: dict[str, object], reason: str) -> None:
    """Arguments that do not go together are the caller's fault, and the blob stays as it was."""
    chunk = make_chain(1, seed=9)[0]
    nbytes = chunk.blob.nbytes + (0 if wrong else BLOCK_BYTES)
    blob = memoryview(bytearray(nbytes))

    with pytest.raises(InvalidRequest, match=reason):
        write_again(chunk, blob, **wrong)

    assert blob == bytes(blob.nbytes)


def test_a_blob_with_something_behind_it_is_refused() -> None:
    """More bytes than the chunk has are as wrong as fewer."""
    chunk = make_chain(1, seed=9)[0]

    with pytest.raises(IntegrityError) as caught:
        read_header(memoryview(bytes(chunk.blob) + bytes(BLOCK_BYTES)))

    assert caught.value.code == "wrong_layout"
