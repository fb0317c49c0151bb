"""Sparse copies as bytes: what goes in comes out, whatever its shape, order and key."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.storage.backends import BLOCK_BYTES, ChunkEntry
from services.storage.backends.blob_names import entry_in
from services.storage.chunk_keys import NoCipher
from services.storage.sparse.format import SparseHeader
from services.storage.sparse.key_codes import encode_keys
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.making import areas, complete
from services.storage.sparse.verification import verify_copy
from shared.errors import IntegrityError, InvalidRequest, KeyMissing
from shared.ids import key_digest
from shared.messages.pools import FLOAT8, KvGeometry
from tests.chunk_makers import SMALL_HIDDEN, make_chain
from tests.unit.storage.sparse.made_copies import CIPHER, GEOMETRY, LAYOUT, copy_key, copy_of, kv_of

ALICE = key_digest("alice")

GEOMETRIES = st.builds(
    KvGeometry,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 3, 8, 16]),
    page_size=st.sampled_from([1, 16, 32, 48, 64]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)


@given(
    geometry=GEOMETRIES,
    block_tokens=st.sampled_from([0, 1, 2, 8, 64]),
    key_id=st.sampled_from(["", ALICE]),
    seed=st.none() | st.integers(0, 9),
)
@settings(max_examples=60)
def test_a_copy_has_the_kv_of_its_chunk(geometry: KvGeometry, block_tokens: int, key_id: str, seed: int | None) -> None:
    """Probe keys and rows are those of the pages, the mapping says where, and its name at rest needs no key."""
    layout = SparseLayout.of(geometry, block_tokens=block_tokens)
    (chunk,) = make_chain(1, seed=1, geometry=geometry)
    order = None if seed is None else np.random.default_rng(seed).permutation(layout.tokens).tolist()
    blob, key = copy_of(chunk, layout, key_id=key_id, order=order), copy_key(chunk, layout)
    name = entry_in(blob[:BLOCK_BYTES], blob.nbytes)

    header, tables = verify_copy(blob, key, layout, cipher=CIPHER, key_id=key_id)

    kv = kv_of(chunk)
    probes, rows = areas(blob, layout, is_sealed=bool(key_id))
    hidden = replace(key, identity=CIPHER.hide(key_id, key.identity), is_sealed=True) if key_id else key
    assert name == ChunkEntry(hidden, blob.nbytes, 0, key_id=key_id)
    assert (header.key, header.layout) == (hidden, layout)
    assert blob.nbytes == layout.blob_bytes(is_sealed=bool(key_id))
    assert blob.nbytes % BLOCK_BYTES == 0
    assert tables.mapping.tolist() == (order or list(range(layout.tokens)))
    assert np.array_equal(probes, encode_keys(kv[:, 0, :, : layout.probe_heads].transpose(0, 2, 1, 3), geometry.dtype))
    assert rows.tobytes() == kv[:, :, tables.mapping].tobytes()


def test_equal_kv_makes_equal_copies() -> None:
    """Whatever was in the buffer before; sealed ones differ each time."""
    (chunk,) = make_chain(1, seed=1, geometry=GEOMETRY)

    assert bytes(copy_of(chunk)) == bytes(copy_of(chunk))
    assert bytes(copy_of(chunk, key_id=ALICE)) != bytes(copy_of(chunk, key_id=ALICE))


@pytest.mark.parametrize(
    ("geometry", "block_tokens", "block_bytes"),
    [
        (KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"), 2, 4096),
        (KvGeometry(layers=2, kv_heads=32, head_dim=128, page_size=16, dtype="float16"), 1, 8192),
        (KvGeometry(layers=2, kv_heads=3, head_dim=64, page_size=16, dtype="float16"), 4, 1536),
        (KvGeometry(layers=2, kv_heads=32, head_dim=96, page_size=16, dtype="float16"), 1, 6144),
        (KvGeometry(layers=2, kv_heads=1, head_dim=2, page_size=16, dtype="float16"), 64, 256),
        (KvGeometry(layers=2, kv_heads=1, head_dim=8, page_size=48, dtype="float16"), 64, 1024),
    ],
)
def test_a_block_is_the_least_that_the_disk_reads_alone(
    geometry: KvGeometry, block_tokens: int, block_bytes: int
) -> None:
    """A power of two of rows that divides the chunk: 4 KiB where rows fill that, else at most half of it."""
    layout = SparseLayout.of(geometry)

    assert (layout.block_tokens, layout.block_bytes) == (block_tokens, block_bytes)


def test_blocks_of_whole_pages_of_the_disk_begin_on_one() -> None:
    """So that reading one costs no second page, sealed or not."""
    layout = SparseLayout.of(KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"))

    for is_sealed in (False, True):
        blocks = range(layout.probe_heads, layout.units)
        starts = [layout.unit_at(layer, unit, is_sealed=is_sealed)[0] for layer in (0, 1) for unit in blocks]
        assert [start % BLOCK_BYTES for start in starts] == [0] * len(starts)


def test_every_unit_has_bytes_of_its_own() -> None:
    """Units follow one another without overlap from the probe keys to the end."""
    for is_sealed in (False, True):
        units = [LAYOUT.unit_at(layer, unit, is_sealed=is_sealed) for layer in range(3) for unit in range(LAYOUT.units)]
        units.sort()
        ends = [start + nbytes for start, nbytes in units]

        assert units[0][0] == LAYOUT.header_bytes(is_sealed=is_sealed)
        assert all(end <= start for end, (start, _) in zip(ends, units[1:], strict=False))
        assert ends[-1] <= LAYOUT.blob_bytes(is_sealed=is_sealed)


def test_another_layout_is_another_name() -> None:
    """Copies with other blocks or of other geometries are never found for one another."""
    other = KvGeometry(layers=3, kv_heads=4, head_dim=8, page_size=32, dtype="float16")
    layouts = [LAYOUT, SparseLayout.of(GEOMETRY), SparseLayout(GEOMETRY, 2, 4), SparseLayout.of(other, block_tokens=4)]
    layouts.append(replace(LAYOUT, has_codes=False))

    assert len({layout.shape for layout in layouts}) == 5
    assert {len(layout.shape) for layout in layouts} == {8}


@pytest.mark.parametrize(
    ("geometry", "block_tokens"),
    [(SMALL_HIDDEN, 0), (GEOMETRY, 3), (GEOMETRY, 128), (msgspec.structs.replace(GEOMETRY, dtype=FLOAT8), 0)],
)
def test_what_has_no_layout_is_refused(geometry: KvGeometry, block_tokens: int) -> None:
    """Hidden states, K and V with scales, and blocks that do not divide a chunk."""
    with pytest.raises(InvalidRequest, match="no sparse copy"):
        SparseLayout.of(geometry, block_tokens=block_tokens)


def test_a_sealed_copy_opens_with_its_key_alone() -> None:
    """Nothing of it lies in the clear; another's key, none, or none at hand are told apart."""
    (chunk,) = make_chain(1, seed=1, geometry=GEOMETRY)
    blob, key, kv = copy_of(chunk, key_id=ALICE), copy_key(chunk), kv_of(chunk)
    plain = copy_of(chunk)

    assert kv[0, 0, 0].tobytes() not in bytes(blob)
    assert kv[0, 0, 0].tobytes() in bytes(plain)
    for copy, key_id in ((blob, ""), (blob, key_digest("bob")), (plain, ALICE)):
        with pytest.raises(IntegrityError) as caught:
            verify_copy(copy, key, LAYOUT, cipher=CIPHER, key_id=key_id)
        assert caught.value.code == "wrong_key"
    with pytest.raises(KeyMissing):
        verify_copy(blob, key, LAYOUT, cipher=NoCipher(), key_id=ALICE)


def test_a_copy_says_where_its_chunk_belongs() -> None:
    """As its chunk does; one of a release that did not say so is still read, and has no place."""
    first, second = make_chain(2, seed=3, geometry=LAYOUT.geometry)
    blob = copy_of(second)
    named = entry_in(blob[:BLOCK_BYTES], blob.nbytes)
    header = SparseHeader(namespace=second.header.namespace, identity=second.header.identity, layout=LAYOUT)
    complete(blob, header, np.arange(LAYOUT.tokens, dtype=np.uint32), CIPHER)
    unnamed = entry_in(blob[:BLOCK_BYTES], blob.nbytes)

    assert named == ChunkEntry(copy_key(second), blob.nbytes, 1, copy_key(first))
    assert unnamed == ChunkEntry(copy_key(second), blob.nbytes)
