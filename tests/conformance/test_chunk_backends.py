"""What every tier guarantees (``services/storage/backends/__init__.py``), checked over each kind of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.storage.backends import ChunkKey
from shared.errors import CapacityError, IntegrityError, TransportError
from tests.chunk_makers import MadeChunk, aligned, make_chain
from tests.conformance.chunk_backends import KINDS, TIMEOUT_S, Tier

THREADS = 8

CHUNKS = make_chain(24, seed=1)
OTHERS = make_chain(4, seed=1, model="another model")
NBYTES = CHUNKS[0].blob.nbytes


@pytest.fixture(params=list(KINDS))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """Each kind of tier in turn, empty."""
    made = KINDS[request.param](tmp_path)
    yield made
    made.mend()
    made.close()


def put(tier: Tier, chunk: MadeChunk, stripe: int = 0) -> bool:
    return tier.backend.put(chunk.key, chunk.blob, stripe=stripe, timeout_s=TIMEOUT_S)


def put_all(tier: Tier, chunks: list[MadeChunk]) -> None:
    for stripe, chunk in enumerate(chunks):
        assert put(tier, chunk, stripe)


def got(tier: Tier, key: ChunkKey) -> bytes:
    """What the tier has of a chunk, b"" for nothing."""
    into = aligned(NBYTES)
    return bytes(into[: tier.backend.get(key, into, timeout_s=TIMEOUT_S)])


def delete(tier: Tier, chunk: MadeChunk) -> bool:
    return tier.backend.delete(chunk.key, timeout_s=TIMEOUT_S)


def listed(tier: Tier, namespace: str = "") -> dict[ChunkKey, int]:
    entries = list(tier.backend.entries(namespace))
    sizes = {entry.key: entry.nbytes for entry in entries}
    assert len(sizes) == len(entries), "an entry came twice"
    return sizes


def assert_lacks(tier: Tier, chunk: MadeChunk) -> None:
    assert got(tier, chunk.key) == b""
    assert chunk.key not in listed(tier)


def test_what_was_put_is_got_byte_for_byte(tier: Tier) -> None:
    """Chunks come back as they were, whatever their stripe."""
    put_all(tier, CHUNKS)

    assert [got(tier, chunk.key) for chunk in CHUNKS] == [bytes(chunk.blob) for chunk in CHUNKS]


def test_a_chunk_that_is_there_is_kept_as_it_is(tier: Tier) -> None:
    """A second put answers False and changes nothing."""
    chunk, other = CHUNKS[:2]
    is_new = put(tier, chunk)

    is_new_again = tier.backend.put(chunk.key, other.blob, stripe=1, timeout_s=TIMEOUT_S)

    assert (is_new, is_new_again) == (True, False)
    assert got(tier, chunk.key) == bytes(chunk.blob)


def test_a_read_only_blob_can_be_put(tier: Tier) -> None:
    """A tier only reads the blob, and need not find it on a block."""
    chunk = CHUNKS[0]

    tier.backend.put(chunk.key, memoryview(bytes(chunk.blob)), stripe=0, timeout_s=TIMEOUT_S)

    assert got(tier, chunk.key) == bytes(chunk.blob)


def test_namespace_and_geometry_are_part_of_the_name(tier: Tier) -> None:
    """A chunk is not found under another namespace or geometry, though its identity were the same."""
    chunk = CHUNKS[0]
    put(tier, chunk)

    for key in (
        ChunkKey(OTHERS[0].key.namespace, chunk.key.geometry, chunk.key.identity),
        ChunkKey(chunk.key.namespace, bytes(8), chunk.key.identity),
    ):
        assert got(tier, key) == b""
        assert not tier.backend.delete(key, timeout_s=TIMEOUT_S)
    assert got(tier, chunk.key) == bytes(chunk.blob)


def test_a_buffer_that_is_too_small_is_an_error(tier: Tier) -> None:
    """A chunk is never read in part."""
    put(tier, CHUNKS[0])

    with pytest.raises(IntegrityError):
        tier.backend.get(CHUNKS[0].key, aligned(NBYTES)[: NBYTES - 4096], timeout_s=TIMEOUT_S)


def test_a_larger_buffer_is_filled_at_the_front(tier: Tier) -> None:
    """What lies behind the chunk in the buffer is left alone."""
    put(tier, CHUNKS[0])
    into = aligned(2 * NBYTES)
    into[:] = b"\xff" * into.nbytes

    nbytes = tier.backend.get(CHUNKS[0].key, into, timeout_s=TIMEOUT_S)

    assert nbytes == NBYTES
    assert bytes(into) == bytes(CHUNKS[0].blob) + b"\xff" * NBYTES


def test_what_was_deleted_is_gone_and_can_come_back(tier: Tier) -> None:
    """Deleting takes one chunk away, once; putting it again is putting a new one."""
    put_all(tier, CHUNKS[:3])

    assert delete(tier, CHUNKS[1])
    assert_lacks(tier, CHUNKS[1])
    assert not delete(tier, CHUNKS[1])
    assert put(tier, CHUNKS[1])
    assert listed(tier) == {chunk.key: NBYTES for chunk in CHUNKS[:3]}


def test_entries_tell_everything_or_one_namespace(tier: Tier) -> None:
    """The inventory has each chunk once, with its size."""
    put_all(tier, CHUNKS)
    put_all(tier, OTHERS)

    assert listed(tier) == {chunk.key: NBYTES for chunk in CHUNKS + OTHERS}
    assert listed(tier, OTHERS[0].key.namespace) == {chunk.key: NBYTES for chunk in OTHERS}
    assert listed(tier, "00" * 16) == {}


def test_an_inventory_may_be_left_half_way(tier: Tier) -> None:
    """Whoever has seen enough stops, and the tier goes on."""
    put_all(tier, CHUNKS)

    entries = tier.backend.entries()
    first = next(iter(entries))
    del entries

    assert first.nbytes == NBYTES
    assert len(listed(tier)) == len(CHUNKS)


def test_chunks_outlive_the_backend(tier: Tier) -> None:
    """What was put is there after a start, and what was deleted is not."""
    if not tier.is_durable:
        pytest.skip("this tier ends with its process")
    put_all(tier, CHUNKS)
    delete(tier, CHUNKS[5])

    tier.reopen()

    left = [chunk for chunk in CHUNKS if chunk is not CHUNKS[5]]
    assert got(tier, left[0].key) == bytes(left[0].blob)  # Before the inventory was asked for.
    assert listed(tier) == {chunk.key: NBYTES for chunk in left}
    assert [got(tier, chunk.key) for chunk in left] == [bytes(chunk.blob) for chunk in left]
    assert_lacks(tier, CHUNKS[5])
    assert not put(tier, left[0])


def test_a_full_tier_refuses_and_goes_on(tier: Tier) -> None:
    """Without room a put is CapacityError and leaves nothing; reading goes on, and writing once there is room."""
    put_all(tier, CHUNKS[:3])
    tier.fill()

    with pytest.raises(CapacityError):
        put(tier, CHUNKS[3])

    assert_lacks(tier, CHUNKS[3])
    assert got(tier, CHUNKS[0].key) == bytes(CHUNKS[0].blob)
    assert not put(tier, CHUNKS[0])
    tier.mend()
    assert put(tier, CHUNKS[3])
    assert listed(tier) == {chunk.key: NBYTES for chunk in CHUNKS[:4]}


def test_a_broken_tier_says_so(tier: Tier) -> None:
    """What needs a tier that cannot be reached is TransportError, and loses nothing."""
    put_all(tier, CHUNKS[:3])
    tier.break_down()

    with pytest.raises(TransportError):
        put(tier, CHUNKS[3])
    with pytest.raises(TransportError):
        got(tier, CHUNKS[0].key)
    with pytest.raises(TransportError):
        delete(tier, CHUNKS[0])

    tier.mend()
    assert_lacks(tier, CHUNKS[3])
    assert listed(tier) == {chunk.key: NBYTES for chunk in CHUNKS[:3]}
    assert [got(tier, chunk.key) for chunk in CHUNKS[:3]] == [bytes(chunk.blob) for chunk in CHUNKS[:3]]
    assert put(tier, CHUNKS[3])


def test_an_interrupted_put_leaves_nothing_at_the_next_start_either(tier: Tier) -> None:
    """A put that failed half-way is forgotten, also by a backend that opens the place anew."""
    if not tier.is_durable:
        pytest.skip("this tier ends with its process")
    put(tier, CHUNKS[0])
    tier.fill()
    with pytest.raises(CapacityError):
        put(tier, CHUNKS[1])
    tier.mend()

    tier.reopen()

    assert listed(tier) == {CHUNKS[0].key: NBYTES}
    assert_lacks(tier, CHUNKS[1])


def test_of_many_writers_of_a_chunk_one_is_told_that_it_was_new(tier: Tier) -> None:
    """Threads that put the same chunk at once get one True between them, and each answer means that it is there."""
    start = threading.Barrier(THREADS)

    def write(place: int) -> tuple[bool, bytes]:
        start.wait()
        return put(tier, CHUNKS[0], stripe=place), got(tier, CHUNKS[0].key)

    with ThreadPoolExecutor(THREADS) as executor:
        answers = list(executor.map(write, range(THREADS)))

    assert sorted(is_new for is_new, _ in answers) == [False] * (THREADS - 1) + [True]
    assert {found for _, found in answers} == {bytes(CHUNKS[0].blob)}
    assert listed(tier) == {CHUNKS[0].key: NBYTES}


def test_different_chunks_may_be_used_at_once(tier: Tier) -> None:
    """Threads that put, get and delete chunks of their own do not disturb one another."""
    start = threading.Barrier(THREADS)

    def use(place: int) -> list[bool]:
        start.wait()
        answers = []
        for chunk in CHUNKS[place::THREADS]:
            answers += [put(tier, chunk, stripe=place), got(tier, chunk.key) == bytes(chunk.blob)]
            answers += [delete(tier, chunk), got(tier, chunk.key) == b"", put(tier, chunk, stripe=place)]
        return answers

    with ThreadPoolExecutor(THREADS) as executor:
        answers = [answer for answers in executor.map(use, range(THREADS)) for answer in answers]

    assert all(answers)
    assert listed(tier) == {chunk.key: NBYTES for chunk in CHUNKS}


def test_a_chunk_that_comes_and_goes_is_only_seen_whole(tier: Tier) -> None:
    """Readers of a chunk that others write and delete all the time get all of it or nothing."""
    chunk, rounds = CHUNKS[0], 20
    is_over = threading.Event()
    start = threading.Barrier(THREADS)

    def change(place: int) -> set[bytes]:
        start.wait()
        for _ in range(rounds):
            put(tier, chunk, stripe=place)
            delete(tier, chunk)
        return set()

    def read(place: int) -> set[bytes]:
        start.wait()
        seen = set()
        while not is_over.is_set():
            seen.add(got(tier, chunk.key))
            assert set(listed(tier)) <= {chunk.key}
        return seen

    with ThreadPoolExecutor(THREADS) as executor:
        readers = [executor.submit(read, place) for place in range(THREADS - 2)]
        writers = [executor.submit(change, place) for place in range(2)]
        for writer in writers:
            writer.result()
        is_over.set()
        seen = set().union(*(reader.result() for reader in readers))

    assert seen <= {b"", bytes(chunk.blob)}
    # Whatever the last answer was, map and tier agree about it.
    assert bool(got(tier, chunk.key)) == (chunk.key in listed(tier))


def test_an_inventory_holds_what_was_there_all_the_time(tier: Tier) -> None:
    """Entries while others write and delete: what nobody touches is in every one of them."""
    put_all(tier, CHUNKS[:8])
    start = threading.Barrier(2)

    def churn() -> None:
        start.wait()
        for chunk in CHUNKS[8:]:
            put(tier, chunk)
            delete(tier, chunk)

    with ThreadPoolExecutor(1) as executor:
        churning = executor.submit(churn)
        start.wait()
        inventories = [listed(tier)]
        while not churning.done():
            inventories.append(listed(tier))
        churning.result()

    steady = {chunk.key for chunk in CHUNKS[:8]}
    assert all(steady <= set(inventory) <= {chunk.key for chunk in CHUNKS} for inventory in inventories)


def test_a_closed_tier_answers_nothing_more(tier: Tier) -> None:
    """Closing may be repeated; calls after it are TransportError."""
    put(tier, CHUNKS[0])

    tier.backend.close()
    tier.backend.close()

    with pytest.raises(TransportError):
        put(tier, CHUNKS[1])
    with pytest.raises(TransportError):
        got(tier, CHUNKS[0].key)
    with pytest.raises(TransportError):
        delete(tier, CHUNKS[0])
    with pytest.raises(TransportError):
        list(tier.backend.entries())
