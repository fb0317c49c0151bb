"""The remote tier against an S3-compatible server, behind a network that hangs, drops, cuts and refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.storage import measures
from services.storage.backends import ChunkKey
from services.storage.backends.object_store import ABSENCE_S, open_remote
from services.storage.config import StorageConfig
from services.storage.core.circuit_breaker import CircuitBreaker
from services.storage.core.retrying import RetryPolicy
from shared.errors import IntegrityError, TransportError
from tests.chunk_makers import MadeChunk, aligned, make_chain
from tests.conformance.object_stores import OBJECT_STORES, TIMEOUT_S, Blocking, S3Place, keep_all

CHUNKS = make_chain(12, seed=2)
CHUNK = CHUNKS[0]
NBYTES = CHUNK.blob.nbytes
WRITERS = 4


@pytest.fixture
def place() -> Iterator[S3Place]:
    made = S3Place()
    yield made
    made.close()


@pytest.fixture
def backend(place: S3Place) -> Iterator[Blocking]:
    made = place.open()
    yield made
    made.close()


def put(backend: Blocking, chunk: MadeChunk = CHUNK) -> bool:
    return backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=TIMEOUT_S)


def got(backend: Blocking, key: ChunkKey = CHUNK.key) -> bytes:
    into = aligned(NBYTES)
    return bytes(into[: backend.get(key, into, timeout_s=TIMEOUT_S)])


def test_a_store_that_was_busy_for_a_while_gets_the_chunk(place: S3Place, backend: Blocking) -> None:
    """Two 503 are waited out, and the third attempt writes; retries and bytes are counted."""
    retries, up = measures.REMOTE_RETRIES.labels("put"), measures.REMOTE_BYTES.labels("up")
    before = (retries._value.get(), up._value.get())
    place.proxy.script.extend(["503", "503"])

    is_new = put(backend)

    assert is_new
    assert place.proxy.requests == [("PUT", 503), ("PUT", 503), ("PUT", 200)]
    assert (retries._value.get(), up._value.get()) == (before[0] + 2, before[1] + NBYTES)


def test_a_store_that_hangs_does_not_hold_its_caller(place: S3Place) -> None:
    """Each verb comes back although the server never answers; when it does again, the tier goes on."""
    backend = place.open(timeout_s=0.4)
    place.proxy.always = "hang"

    for verb in (
        lambda: backend.put(CHUNK.key, CHUNK.blob, stripe=0, timeout_s=0.3),
        lambda: backend.get(CHUNK.key, aligned(NBYTES), timeout_s=0.3),
        lambda: list(backend.entries()),
    ):
        with pytest.raises(TransportError):
            verb()

    assert place.proxy.hanging.wait(20.0)
    assert not place.proxy.closing.is_set()
    place.proxy.always = ""
    other = place.open()
    assert put(other)
    backend.close()
    other.close()


def test_a_connection_that_stalls_is_given_up_while_there_is_time_for_another(place: S3Place) -> None:
    """One request hangs; before the time is over a second one is made, and its answer counts."""
    backend = place.open(timeout_s=8.0)
    put(backend)
    place.proxy.script.append("hang")

    found = got(backend)

    assert found == bytes(CHUNK.blob)
    backend.close()


@pytest.mark.parametrize("fault", ["cut", "drop", "429", "500"])
def test_a_read_that_broke_off_is_repeated(place: S3Place, backend: Blocking, fault: str) -> None:
    """A connection that ends before the answer, or in the middle of the body, costs one attempt."""
    put(backend)
    place.proxy.script.append(fault)

    found = got(backend)

    assert found == bytes(CHUNK.blob)
    assert place.proxy.count("GET") == 2


def test_a_body_that_is_never_whole_is_an_outage(place: S3Place, backend: Blocking) -> None:
    """Half a chunk is none."""
    put(backend)
    place.proxy.always = "cut"

    with pytest.raises(TransportError):
        got(backend)


def test_of_an_object_that_is_too_large_one_byte_too_many_is_read(place: S3Place, backend: Blocking) -> None:
    """However large it is: that byte shows it, and it is refused."""
    place.write_directly(f"some/prefix/{CHUNK.key.path}", bytes(8 * NBYTES))
    down = measures.REMOTE_BYTES.labels("down")
    before = down._value.get()

    with pytest.raises(IntegrityError, match=f"more than {NBYTES} bytes"):
        backend.get(CHUNK.key, aligned(NBYTES), timeout_s=TIMEOUT_S)

    assert down._value.get() == before + NBYTES + 1
    assert place.proxy.count("GET") == 1


def test_a_body_that_is_announced_and_never_comes_is_an_outage(place: S3Place, backend: Blocking) -> None:
    """A terabyte is announced: nobody waits for it longer than for any answer, or takes memory for it."""
    put(backend)
    impatient = place.open(timeout_s=0.4)
    place.proxy.always = "huge"

    with pytest.raises(TransportError):
        impatient.get(CHUNK.key, aligned(NBYTES), timeout_s=0.4)

    impatient.close()


def test_a_write_whose_answer_was_lost_is_found_in_place(place: S3Place, backend: Blocking) -> None:
    """The second attempt learns that the chunk is there, and it is whole."""
    place.proxy.script.append("lost")

    is_new = put(backend)

    assert not is_new
    assert got(backend) == bytes(CHUNK.blob)
    assert place.proxy.requests[:2] == [("PUT", 0), ("PUT", 412)]


def test_a_refusal_of_our_credentials_is_not_repeated(place: S3Place, backend: Blocking) -> None:
    """403 fails at once, as an outage of the tier."""
    place.proxy.always = "403"

    with pytest.raises(TransportError, match="403"):
        put(backend)

    assert place.proxy.requests == [("PUT", 403)]


def test_a_bucket_that_is_not_there_is_not_an_empty_one(place: S3Place) -> None:
    """Reading from and writing to it are outages, not misses."""
    place.bucket = "no-such-bucket"
    backend = place.open()

    with pytest.raises(TransportError, match="NoSuchBucket"):
        got(backend)
    with pytest.raises(TransportError, match="NoSuchBucket"):
        put(backend)
    backend.close()


def test_an_outage_is_not_asked_again_until_the_cool_down_is_over(place: S3Place) -> None:
    """After two failed calls nothing goes out; then one probe, and with its answer the tier is back."""
    now_s = [0.0]
    breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)
    backend = place.open_at(lambda: now_s[0], breaker, RetryPolicy(attempts=1))
    place.proxy.always = "503"
    for _ in range(4):
        with pytest.raises(TransportError):
            put(backend)
    asked_before_the_probe = place.proxy.count("PUT")

    now_s[0] = 10.0
    place.proxy.always = ""
    is_new = put(backend)

    assert asked_before_the_probe == 2
    assert is_new
    backend.close()


def test_a_miss_is_not_asked_again_for_a_while(place: S3Place) -> None:
    """It is asked once; again when the time is over, or when the chunk was written here."""
    now_s = [0.0]
    breaker = CircuitBreaker(failures_to_open=2, cool_down_s=10.0)
    backend = place.open_at(lambda: now_s[0], breaker, RetryPolicy())

    misses = [got(backend), got(backend)]
    asked = len(place.proxy.requests)
    now_s[0] = ABSENCE_S
    misses.append(got(backend))
    put(backend)

    assert misses == [b"", b"", b""]
    assert (asked, place.proxy.count("GET")) == (1, 2)
    assert got(backend) == bytes(CHUNK.blob)
    backend.close()


def write_all_at_once(backends: Sequence[Blocking]) -> int:
    """Every writer of every backend puts all chunks; returns how often one was told that it was new."""
    start = threading.Barrier(WRITERS * len(backends))

    def write(backend: Blocking) -> int:
        start.wait()
        return sum(put(backend, chunk) for chunk in CHUNKS)

    with ThreadPoolExecutor(WRITERS * len(backends)) as executor:
        return sum(executor.map(write, [*backends] * WRITERS))


def test_two_nodes_that_write_the_same_chunks_store_each_once(place: S3Place) -> None:
    """However they race, one write of each chunk succeeds, and one writer is told that it was new."""
    backends = [place.open(), place.open()]

    new = write_all_at_once(backends)

    assert new == len(CHUNKS) == place.proxy.count("PUT", 200)
    assert place.proxy.count("PUT", 412) == (2 * WRITERS - 1) * len(CHUNKS)
    assert all(got(backend, chunk.key) == bytes(chunk.blob) for backend in backends for chunk in CHUNKS)
    for backend in backends:
        backend.close()


def test_two_nodes_that_share_a_directory_store_each_chunk_once(tmp_path: Path) -> None:
    """Of all writers of a file, one is told that it was new, and only whole files are left."""
    opened = [open_remote(StorageConfig(remote=tmp_path.as_uri())) for _ in range(2)]
    backends = [Blocking(backend) for backend in opened if backend]

    new = write_all_at_once(backends)

    assert new == len(CHUNKS)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in files.items()} == {
        chunk.key.path: bytes(chunk.blob) for chunk in CHUNKS
    }
    for backend in backends:
        backend.close()


def test_a_store_without_conditional_writes_is_asked_first(place: S3Place, backend: Blocking) -> None:
    """501 to a conditional write is remembered: from then on a head and, if need be, a plain write. What is there is
    looked at.
    """
    place.proxy.script.append("501")

    answers = [put(backend), put(backend), put(backend, CHUNKS[1])]

    assert answers == [True, False, True]
    assert place.proxy.requests == [
        ("PUT", 501),
        ("HEAD", 404),
        ("PUT", 200),
        ("HEAD", 200),
        ("HEAD", 200),
        ("GET", 206),
        ("HEAD", 404),
        ("PUT", 200),
    ]


def test_conditional_writes_can_be_switched_off(place: S3Place) -> None:
    """With the provider's variable no conditional write is tried, and racing nodes leave whole chunks."""
    backends = [place.open(AWS_CONDITIONAL_PUT="disabled") for _ in range(2)]

    new = write_all_at_once(backends)

    assert new >= len(CHUNKS)
    assert place.proxy.count("PUT", 412) == 0
    assert all(got(backend, chunk.key) == bytes(chunk.blob) for backend in backends for chunk in CHUNKS)
    for backend in backends:
        backend.close()


def test_objects_of_others_are_not_chunks(place: S3Place, backend: Blocking) -> None:
    """A bucket may hold other things beside the prefix and under it."""
    put(backend)
    place.write_directly("some/prefix/readme.txt", b"hello")
    place.write_directly(CHUNKS[1].key.path, CHUNKS[1].blob.tobytes())

    entries = list(backend.entries())

    assert [(entry.key, entry.nbytes) for entry in entries] == [(CHUNK.key, NBYTES)]
    assert got(backend, CHUNKS[1].key) == b""


@pytest.mark.parametrize("kind", OBJECT_STORES)
async def test_many_requests_are_awaited_at_once(tmp_path: Path, kind: str) -> None:
    """Blobs are stored, found with their sizes, read and removed, all together; what is gone is removed again."""
    tier = OBJECT_STORES[kind](tmp_path)
    store = tier.backend.remote
    keys = sorted(chunk.key for chunk in CHUNKS)

    stored = await asyncio.gather(
        *(store.store(chunk.key, bytes(chunk.blob), keep, timeout_s=TIMEOUT_S) for chunk in CHUNKS[1:])
    )
    sizes = await store.sizes(keys)
    bodies = await asyncio.gather(*(store.fetch(chunk.key, NBYTES, timeout_s=TIMEOUT_S) for chunk in CHUNKS))
    await store.remove([chunk.key for chunk in CHUNKS[1:6]], timeout_s=TIMEOUT_S)
    await store.remove([chunk.key for chunk in CHUNKS[:7]], timeout_s=TIMEOUT_S)

    assert stored == ["new"] * (len(CHUNKS) - 1)
    assert sizes == [0 if key == CHUNK.key else NBYTES for key in keys]
    assert bodies[0] is None
    assert [bytes(body or b"") for body in bodies[1:]] == [bytes(chunk.blob) for chunk in CHUNKS[1:]]
    assert sorted(entry.key for entry in store.entries()) == sorted(chunk.key for chunk in CHUNKS[7:])
    tier.close()


def keep(nbytes: int, front: bytes) -> bool:
    """What is there, and begins as a chunk, stays."""
    return not front.startswith(bytes(CHUNK.blob[:8]))


@pytest.mark.parametrize("kind", OBJECT_STORES)
async def test_what_does_not_belong_there_is_replaced(tmp_path: Path, kind: str) -> None:
    """By its size or by its first bytes; an empty object, too. Anything else stays as it is."""
    tier = OBJECT_STORES[kind](tmp_path)
    store, whole = tier.backend.remote, bytes(CHUNK.blob)
    other = whole[:-1] + bytes([whole[-1] ^ 1])

    stored: list[str] = []
    for there in (other, whole[:4096], b"", bytes(NBYTES)):
        await store.remove([CHUNK.key], timeout_s=TIMEOUT_S)
        await store.store(CHUNK.key, there, keep, timeout_s=TIMEOUT_S)
        stored.append(await store.store(CHUNK.key, whole, keep, timeout_s=TIMEOUT_S))
        found = await store.fetch(CHUNK.key, NBYTES, timeout_s=TIMEOUT_S)
        stored.append("whole" if bytes(found or b"") == whole else "other")

    assert stored == ["there", "other", "replaced", "whole", "replaced", "whole", "replaced", "whole"]
    tier.close()


async def put_all(backend: Blocking) -> None:
    for chunk in CHUNKS:
        await backend.remote.store(chunk.key, bytes(chunk.blob), keep_all, timeout_s=TIMEOUT_S)


async def test_sizes_are_listed_between_the_first_and_the_last(place: S3Place, backend: Blocking) -> None:
    """One request tells of many chunks, and another shape or namespace is not looked at."""
    await put_all(backend)
    keys = sorted(chunk.key for chunk in CHUNKS)
    before = len(place.proxy.requests)

    sizes = await backend.remote.sizes(keys[3:9:2])

    assert sizes == [NBYTES] * 3
    assert place.proxy.requests[before:] == [("GET", 200)]


async def test_many_are_deleted_in_one_request(place: S3Place, backend: Blocking) -> None:
    """Nobody asks for each whether it is there."""
    await put_all(backend)
    before = len(place.proxy.requests)

    await backend.remote.remove([chunk.key for chunk in CHUNKS], timeout_s=TIMEOUT_S)

    assert place.proxy.requests[before:] == [("POST", 200)]
    assert list(backend.entries()) == []
