"""Bit rot, torn writes and mix-ups: in a thousand chunks, not one goes unnoticed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from services.storage.chunk_format import FIXED_BYTES, header_nbytes
from services.storage.chunk_verification import verify_chunk
from shared.errors import IntegrityError
from tests.chunk_makers import SMALL, MadeChunk, make_chain

COUNT = 1000
HEADER = header_nbytes(SMALL)

CHAIN = make_chain(COUNT, seed=11)


Damage = Callable[[bytearray, random.Random, MadeChunk], tuple[bytearray, set[str]]]
"""Changes a blob (another chunk's may help); returns what is found instead, and the codes that this may have."""


def _flipped(blob: bytearray, at: int, chance: random.Random) -> bytearray:
    blob[at] ^= 1 << chance.randrange(8)
    return blob


def _codes_at(at: int) -> set[str]:
    if at < 8:
        return {"not_a_chunk"}
    if at < 12:
        return {"unknown_version"}
    return {"header_checksum"} if at < HEADER else {"wrong_checksum"}


def flip(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """One bit, anywhere."""
    at = chance.randrange(len(blob))
    return _flipped(blob, at, chance), _codes_at(at)


def flip_in_fixed_header(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """One bit where every bit has a meaning."""
    at = chance.randrange(FIXED_BYTES)
    return _flipped(blob, at, chance), _codes_at(at)


def truncate(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """The end is missing: anything from one byte to all of it."""
    end = chance.randrange(len(blob))
    return blob[:end], {"truncated"} if end else {"not_a_chunk"}


def zero_the_end(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """The length is right, but what was written last did not arrive."""
    # Behind the payload there are zeros anyway.
    start = chance.randrange(HEADER + other.header.payload_bytes)
    codes = {"not_a_chunk"} if start < 8 else {"unknown_version"} if start == 8 else {"header_checksum"}
    blob[start:] = bytes(len(blob) - start)
    return blob, codes if start < HEADER else {"wrong_checksum"}


def zero_a_sector(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """512 bytes of header or payload were lost."""
    at = chance.choice([0, *range(HEADER, HEADER + other.header.payload_bytes, 512)])
    blob[at : at + 512] = bytes(512)
    return blob, {"wrong_checksum"} if at else {"not_a_chunk"}


def swap_chunks(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """Another, perfect chunk lies under this one's name."""
    return bytearray(other.blob), {"wrong_identity"}


def swap_pages(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """Two pages of the payload changed places."""
    one, two = (HEADER + page * SMALL.page_bytes for page in chance.sample(range(4), 2))
    first, second = blob[one : one + SMALL.page_bytes], blob[two : two + SMALL.page_bytes]
    blob[one : one + SMALL.page_bytes], blob[two : two + SMALL.page_bytes] = second, first
    return blob, {"wrong_checksum"}


def swap_layers(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """The two layers of a page changed places."""
    start, size = HEADER + chance.randrange(4) * SMALL.page_bytes, 2 * SMALL.half_bytes
    layers = blob[start : start + 2 * size]
    blob[start : start + 2 * size] = layers[size:] + layers[:size]
    return blob, {"wrong_checksum"}


def swap_payloads(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """This chunk's header over another chunk's KV."""
    return blob[:HEADER] + other.blob[HEADER:], {"wrong_checksum"}


def swap_headers(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """The fixed header is another chunk's, the tables are this one's."""
    return bytearray(other.blob[:FIXED_BYTES]) + blob[FIXED_BYTES:], {"header_checksum"}


KINDS: list[Damage] = [
    flip,
    flip_in_fixed_header,
    truncate,
    zero_the_end,
    zero_a_sector,
    swap_chunks,
    swap_pages,
    swap_layers,
    swap_payloads,
    swap_headers,
]


def test_unharmed_chunks_verify() -> None:
    """A thousand chunks as they were written all pass, so that what is refused below is refused for its damage."""
    for chunk in CHAIN:
        header = verify_chunk(memoryview(bytearray(chunk.blob)), chunk.key, SMALL)

        assert header == chunk.header


@pytest.mark.parametrize("damage", KINDS, ids=lambda damage: damage.__name__)
def test_every_damaged_chunk_is_refused(damage: Damage) -> None:
    """Each of a thousand chunks, damaged at a place of its own, is refused with the code that tells what happened."""
    chance = random.Random(damage.__name__)
    met: Counter[str] = Counter()
    for place, chunk in enumerate(CHAIN):
        found, codes = damage(bytearray(chunk.blob), chance, CHAIN[(place + 1) % COUNT])
        assert found != chunk.blob

        with pytest.raises(IntegrityError) as caught:
            verify_chunk(memoryview(found), chunk.key, SMALL)

        assert caught.value.code in codes, (place, caught.value.code, codes)
        met[caught.value.code] += 1
    assert met.total() == COUNT


def test_chunks_of_two_namespaces_are_never_exchanged() -> None:
    """Equal tokens of another namespace, under this one's name, are refused as what they are."""
    for mine, theirs in zip(CHAIN[:50], make_chain(50, seed=11, model="another model"), strict=True):
        with pytest.raises(IntegrityError) as caught:
            verify_chunk(memoryview(bytearray(theirs.blob)), mine.key, SMALL)

        assert caught.value.code == "wrong_namespace"
