"""Bit rot, torn writes and mix-ups: in a thousand chunks, not one goes unnoticed."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.storage import measures
from services.storage.chunk_format import FIXED_BYTES, blob_nbytes, header_nbytes, payload_view, write_header
from services.storage.chunk_payload import hash_payload
from services.storage.chunk_reading import verify_chunk
from shared.errors import IntegrityError
from shared.messages.pools import KvGeometry
from tests.chunk_makers import SMALL, SMALL_HIDDEN, MadeChunk, aligned, make_chain

COUNT = 1000
HEADER = header_nbytes(SMALL)  # That of SMALL_HIDDEN has the same size.

CHAINS = {
    "KV": make_chain(COUNT, seed=11),
    "hidden": make_chain(COUNT, seed=11, geometry=SMALL_HIDDEN),
}

EITHER = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


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
    size = other.header.geometry.page_bytes
    one, two = (HEADER + page * size for page in chance.sample(range(4), 2))
    first, second = blob[one : one + size], blob[two : two + size]
    blob[one : one + size], blob[two : two + size] = second, first
    return blob, {"wrong_checksum"}


def swap_units(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """Two neighbours among the units of a page changed places: layers of KV, or the parts of a hidden page."""
    geometry = other.header.geometry
    size, first = geometry.unit_bytes, chance.randrange(geometry.units - 1)
    start = HEADER + chance.randrange(4) * geometry.page_bytes + first * size
    units = blob[start : start + 2 * size]
    blob[start : start + 2 * size] = units[size:] + units[:size]
    return blob, {"wrong_checksum"}


def swap_payloads(blob: bytearray, chance: random.Random, other: MadeChunk) -> tuple[bytearray, set[str]]:
    """This chunk's header over another chunk's pages."""
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
    swap_units,
    swap_payloads,
    swap_headers,
]


@EITHER
def test_unharmed_chunks_verify(chain: list[MadeChunk]) -> None:
    """A thousand chunks as they were written all pass, so that what is refused below is refused for its damage."""
    assert chain[0].header.header_bytes == HEADER
    for chunk in chain:
        header = verify_chunk(memoryview(bytearray(chunk.blob)), chunk.key, chunk.header.geometry)

        assert header == chunk.header


@EITHER
@pytest.mark.parametrize("damage", KINDS, ids=lambda damage: damage.__name__)
def test_every_damaged_chunk_is_refused(damage: Damage, chain: list[MadeChunk]) -> None:
    """Each of a thousand chunks, damaged at a place of its own, is refused with the code that tells what happened."""
    chance = random.Random(damage.__name__)
    met: Counter[str] = Counter()
    for place, chunk in enumerate(chain):
        found, codes = damage(bytearray(chunk.blob), chance, chain[(place + 1) % COUNT])
        assert found != chunk.blob

        with pytest.raises(IntegrityError) as caught:
            verify_chunk(memoryview(found), chunk.key, chunk.header.geometry)

        assert caught.value.code in codes, (place, caught.value.code, codes)
        met[caught.value.code] += 1
    assert met.total() == COUNT


@EITHER
def test_chunks_of_two_namespaces_are_never_exchanged(chain: list[MadeChunk]) -> None:
    """Equal tokens of another namespace, under this one's name, are refused as what they are."""
    geometry = chain[0].header.geometry
    strangers = make_chain(50, seed=11, geometry=geometry, model="another model")
    for mine, theirs in zip(chain[:50], strangers, strict=True):
        with pytest.raises(IntegrityError) as caught:
            verify_chunk(memoryview(bytearray(theirs.blob)), mine.key, geometry)

        assert caught.value.code == "wrong_namespace"


@EITHER
def test_kv_and_hidden_states_of_the_same_tokens_are_never_exchanged(chain: list[MadeChunk]) -> None:
    """They have one identity, and differ in their geometry alone: that is what is said of the other under its name."""
    mine = chain[0]
    form = mine.header.geometry
    others = [SMALL_HIDDEN, SMALL_HIDDEN.as_kv, msgspec.structs.replace(SMALL_HIDDEN, absent=0)]
    for geometry in [geometry for geometry in others if geometry != form]:
        theirs = _same_tokens(mine, geometry)

        with pytest.raises(IntegrityError) as caught:
            verify_chunk(memoryview(bytearray(theirs.blob)), mine.key, form)

        assert theirs.key.identity == mine.key.identity
        assert caught.value.code == "wrong_geometry"


def _same_tokens(chunk: MadeChunk, geometry: KvGeometry) -> MadeChunk:
    blob = aligned(blob_nbytes(geometry))
    header = write_header(
        blob,
        namespace=chunk.header.namespace,
        geometry=geometry,
        depth=0,
        parent=chunk.header.parent,
        tokens=chunk.header.tokens,
        checksums=hash_payload(payload_view(blob, geometry), geometry, chunk.header.identities),
    )
    return MadeChunk(header, blob)


def test_every_code_is_counted_from_0() -> None:
    """Codes that the storage gives an IntegrityError are those whose series are there before a chunk is bad."""
    folder = Path(measures.__file__).parent
    calls = [
        ast.unparse(node)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    named = {found[1] for call in calls if (found := re.match(r"IntegrityError\(.*code='(\w+)'\)$", call))}
    wrong = {f"wrong_{found[1]}" for call in calls if (found := re.match(r"_wrong\('(\w+)'", call))}

    assert named | wrong | {IntegrityError.code, "tells_tokens"} == set(measures.BAD_REASONS)
