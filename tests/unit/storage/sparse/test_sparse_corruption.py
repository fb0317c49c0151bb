"""Bit rot, torn writes and mix-ups in sparse copies: a read gives the right bytes or an error, never others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from services.storage.sparse.key_codes import encode_keys
from services.storage.sparse.layout import FIXED_BYTES, SparseLayout
from services.storage.sparse.part_reading import HeadReading, PartReading
from services.storage.sparse.read_check import Asked
from services.storage.sparse.read_plan import plan_reads, region_bytes
from services.storage.sparse.verification import verify_copy
from shared.errors import IntegrityError, NotFound
from shared.ids import key_digest
from shared.messages.pools import KvGeometry
from tests.chunk_makers import MadeChunk, aligned, make_chain
from tests.memory_backend import MemoryBackend
from tests.unit.storage.sparse.made_copies import CIPHER, copy_key, copy_of, kv_of

COUNT = 1000
ALICE = key_digest("alice")
GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=4, page_size=16, dtype="float16")
LAYOUT = SparseLayout.of(GEOMETRY, block_tokens=8)
ORDER = np.random.default_rng(1).permutation(64).tolist()

CHUNKS = make_chain(40, seed=21, geometry=GEOMETRY)
COPIES = {
    key_id: [
        copy_of(chunk, LAYOUT, key_id=key_id, order=ORDER if number % 2 else None)
        for number, chunk in enumerate(CHUNKS)
    ]
    for key_id in ("", ALICE)
}

Damage = Callable[[bytearray, random.Random, bytes], bytearray]
"""Changes a copy, which another may help; returns what is found instead."""


def _unit(chance: random.Random, is_sealed: bool) -> tuple[int, int]:
    return LAYOUT.unit_at(chance.randrange(2), chance.randrange(LAYOUT.units), is_sealed=is_sealed)


def _is_sealed(blob: bytearray) -> bool:
    return len(blob) == LAYOUT.blob_bytes(is_sealed=True)


def flip(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """One bit, anywhere."""
    blob[chance.randrange(len(blob))] ^= 1 << chance.randrange(8)
    return blob


def flip_in_fixed_header(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """One bit where every bit has a meaning."""
    blob[chance.randrange(FIXED_BYTES)] ^= 1 << chance.randrange(8)
    return blob


def flip_in_tables(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """One bit of what says where rows are and what units hash to."""
    blob[FIXED_BYTES + chance.randrange(LAYOUT.table_bytes)] ^= 1 << chance.randrange(8)
    return blob


def truncate(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """The end is missing: anything from one byte to all of it."""
    return blob[: chance.randrange(len(blob))]


def zero_the_end(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """The length is right, but what was written last did not arrive."""
    start = chance.randrange(len(blob))
    blob[start:] = bytes(len(blob) - start)
    return blob


def zero_a_sector(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """512 bytes were lost."""
    at = chance.randrange(0, len(blob), 512)
    blob[at : at + 512] = bytes(512)
    return blob


def swap_copies(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """Another, perfect copy lies under this one's name."""
    return bytearray(other)


def swap_units(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """Two blocks changed places."""
    (one, nbytes), (two, _) = (
        LAYOUT.unit_at(chance.randrange(2), unit, is_sealed=_is_sealed(blob))
        for unit in chance.sample(range(LAYOUT.probe_heads, LAYOUT.units), 2)
    )
    blob[one : one + nbytes], blob[two : two + nbytes] = blob[two : two + nbytes], blob[one : one + nbytes]
    return blob


def take_a_unit(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """One unit is that of another copy."""
    start, nbytes = _unit(chance, _is_sealed(blob))
    blob[start : start + nbytes] = other[start : start + nbytes]
    return blob


def swap_rows(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """This copy's header over another copy's KV."""
    start = LAYOUT.header_bytes(is_sealed=_is_sealed(blob))
    return blob[:start] + other[start:]


def swap_headers(blob: bytearray, chance: random.Random, other: bytes) -> bytearray:
    """The fixed header is another copy's, the tables are this one's."""
    return bytearray(other[:FIXED_BYTES]) + blob[FIXED_BYTES:]


KINDS: list[Damage] = [
    flip,
    flip_in_fixed_header,
    flip_in_tables,
    truncate,
    zero_the_end,
    zero_a_sector,
    swap_copies,
    swap_units,
    take_a_unit,
    swap_rows,
    swap_headers,
]


def _read(chunk: MadeChunk, blob: bytes, key_id: str, asked: Asked) -> bytes:
    """What a read of a disk gives that has ``blob`` under the name of the chunk's copy."""
    backend, key = MemoryBackend(max_bytes=2**20), copy_key(chunk, LAYOUT)
    backend.put(key, memoryview(blob), stripe=0, timeout_s=1.0)
    region = aligned(max(region_bytes(LAYOUT), LAYOUT.header_bytes(is_sealed=True)))
    heads = HeadReading(backend, [key], LAYOUT, CIPHER, key_id)
    failure = heads(region)
    if failure is not None:
        raise failure.error
    opened = [heads.opened[key]]
    into = memoryview(bytearray(asked.nbytes))
    reads = plan_reads(asked, [opened[0].inverse], LAYOUT, is_sealed=bool(key_id))
    failure = PartReading(backend, asked, reads, opened, CIPHER, into)(region)
    if failure is not None:
        raise failure.error
    return bytes(into)


def _asks(chunk: MadeChunk, chance: random.Random) -> list[tuple[Asked, bytes]]:
    """A read of each kind, and what it must give."""
    kv, key, layer = kv_of(chunk), copy_key(chunk, LAYOUT), chance.randrange(2)
    chosen = sorted(chance.sample(range(64), 20))
    every = np.arange(64, dtype=np.int32)[None]
    some = np.array([chosen], np.int32)
    return [
        (
            Asked((key,), 0, layer, (), (0, 1), every, 2 * 64 * LAYOUT.probe_row_bytes),
            encode_keys(kv[layer, 0].transpose(1, 0, 2), GEOMETRY.dtype).tobytes(),
        ),
        (Asked((key,), 0, layer, (0, 1), (), some, 40 * LAYOUT.row_bytes), kv[layer][:, chosen].tobytes()),
        (Asked((key,), 0, layer, (1,), (1,), some, 20 * LAYOUT.head_bytes), kv[layer, 1, chosen, 1].tobytes()),
    ]


@pytest.mark.parametrize("key_id", COPIES, ids=["plain", "sealed"])
@pytest.mark.parametrize("damage", KINDS, ids=lambda damage: damage.__name__)
def test_no_damage_gives_other_bytes(damage: Damage, key_id: str) -> None:
    """A thousand copies, each damaged at a place of its own: it is refused, or what is read of it is right."""
    chance = random.Random(damage.__name__)
    met: Counter[str] = Counter()
    for number in range(COUNT // len(KINDS) + 1):
        place = number % len(CHUNKS)
        blob = bytes(COPIES[key_id][place])
        found = bytes(damage(bytearray(blob), chance, bytes(COPIES[key_id][(place + 1) % len(CHUNKS)])))
        for asked, expected in _asks(CHUNKS[place], chance):
            try:
                assert _read(CHUNKS[place], found, key_id, asked) == expected, (number, asked)
                met["right"] += 1
            except IntegrityError as error:
                met[error.code] += 1
            except NotFound:
                assert found == b""  # Nothing is left of it.
    refused = met.total() - met["right"]

    assert refused, met
    assert "integrity_error" not in met


@pytest.mark.parametrize("key_id", COPIES, ids=["plain", "sealed"])
@pytest.mark.parametrize("damage", KINDS, ids=lambda damage: damage.__name__)
def test_a_whole_copy_shows_every_damage(damage: Damage, key_id: str) -> None:
    """What the scrubber and a rewriting look at is all of it: no changed bit passes."""
    chance = random.Random(damage.__name__)
    for place, chunk in enumerate(CHUNKS):
        blob = bytes(COPIES[key_id][place])
        found = damage(bytearray(blob), chance, bytes(COPIES[key_id][(place + 1) % len(CHUNKS)]))
        if bytes(found) == blob:
            continue  # Zeros were lost.

        with pytest.raises(IntegrityError):
            verify_copy(memoryview(found), copy_key(chunk, LAYOUT), LAYOUT, cipher=CIPHER, key_id=key_id)


def test_copies_of_two_namespaces_are_never_exchanged() -> None:
    """Equal tokens of another namespace, under this one's name, are refused as what they are."""
    (stranger,) = make_chain(1, seed=21, geometry=GEOMETRY, model="another model")

    with pytest.raises(IntegrityError) as caught:
        verify_copy(copy_of(stranger, LAYOUT), copy_key(CHUNKS[0], LAYOUT), LAYOUT, cipher=CIPHER, key_id="")

    assert caught.value.code == "wrong_namespace"


def test_a_unit_of_an_older_writing_is_refused() -> None:
    """A sealed copy that was written anew takes no unit of what it was before, though both are genuine."""
    chunk, key = CHUNKS[0], copy_key(CHUNKS[0], LAYOUT)
    old, new = copy_of(chunk, LAYOUT, key_id=ALICE), copy_of(chunk, LAYOUT, key_id=ALICE, order=ORDER)
    start, nbytes = LAYOUT.unit_at(1, 3, is_sealed=True)
    new[start : start + nbytes] = old[start : start + nbytes]

    with pytest.raises(IntegrityError) as caught:
        verify_copy(new, key, LAYOUT, cipher=CIPHER, key_id=ALICE)

    assert caught.value.code == "wrong_checksum"
