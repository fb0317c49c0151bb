"""The remote tier over stores in this process; over a server it is in ``tests/conformance``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from services.storage.backends import REMOTE_WIDTH, ChunkKey
from services.storage.backends.guarded_calls import GuardedCalls
from services.storage.backends.object_store import HEADS_AT_ONCE, ObjectStoreBackend, open_remote
from services.storage.backends.remote_location import RemoteLocation, parse_remote
from services.storage.backends.remote_stores import connect
from services.storage.backends.store_calls import LIST_PAGE, StoreCalls
from services.storage.config import StorageConfig
from shared.errors import ConfigError, TransportError
from tests.conformance.object_stores import keep_all
from tests.mountable_disks import KINDS, opened_disk

BLOB = bytes(4096)
TIMEOUT_S = 5.0

Make = Callable[[StoreCalls, RemoteLocation], ObjectStoreBackend]


async def _no_pause(delay_s: float) -> None:
    """Try again at once."""


def key(number: int) -> ChunkKey:
    return ChunkKey("ab" * 16, b"geometry", number.to_bytes(16, "big"))


async def write(backend: ObjectStoreBackend, numbers: Iterable[int]) -> None:
    for number in numbers:
        await backend.store(key(number), BLOB, keep_all, timeout_s=TIMEOUT_S)


class BrokenListing(StoreCalls):
    """Each listing breaks off once, at its second page."""

    def __init__(self, location: RemoteLocation) -> None:
        super().__init__(location, MemoryStore())
        self.starts: list[str | None] = []
        self._pages = 0

    def list(self, prefix: str | None, after: str | None) -> Any:
        self.starts.append(after)
        return super().list(prefix, after)

    async def page(self, stream: Any) -> Sequence[Any]:
        self._pages += 1
        if self._pages == 2:
            raise GenericError("status code: 503 Service Unavailable")
        return await super().page(stream)


class GatedHeads(StoreCalls):
    """Heads wait for a gate, but one that fails once the others wait."""

    def __init__(self, location: RemoteLocation, store: Any) -> None:
        super().__init__(location, store)
        self.gate = asyncio.Event()
        self.held = self.cut_off = 0
        self.failing = ""

    async def head(self, path: str) -> int:
        if path == self.failing:
            while self.held < 7:
                await asyncio.sleep(0)
            raise TransportError("it is what it is")
        self.held += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        return await super().head(path)


@pytest.fixture
def make() -> Iterator[Make]:
    """Make a backend that does not wait between attempts."""
    made: list[ObjectStoreBackend] = []

    def make(store: StoreCalls, location: RemoteLocation) -> ObjectStoreBackend:
        calls = GuardedCalls("test://", timeout_s=TIMEOUT_S, slots=2, pause=_no_pause)
        made.append(ObjectStoreBackend(location, store, calls))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def test_no_url_is_no_tier() -> None:
    """Without a setting there is nothing, and a faulty one is told."""
    assert open_remote(StorageConfig()) is None
    with pytest.raises(ConfigError):
        open_remote(StorageConfig(remote="ftp://host"))


async def test_an_inventory_of_many_pages_is_whole(make: Make) -> None:
    """A listing longer than a page comes in order, without a gap or a repeat."""
    location = RemoteLocation("memory")
    backend = make(StoreCalls(location, MemoryStore()), location)
    numbers = range(LIST_PAGE + 1)
    await write(backend, numbers)

    entries = list(backend.entries())

    assert sorted(entry.key for entry in entries) == [key(number) for number in numbers]


async def test_a_listing_that_broke_off_goes_on_behind_the_last_name(make: Make) -> None:
    """Where the store lists in order, the second attempt begins where the first page ended."""
    location = RemoteLocation("s3", "bucket")
    store = BrokenListing(location)
    backend = make(store, location)
    numbers = range(LIST_PAGE + 1)
    await write(backend, numbers)

    entries = list(backend.entries())

    assert [entry.key for entry in entries] == [key(number) for number in numbers]
    assert store.starts == [None, key(LIST_PAGE - 1).path]


async def test_a_listing_without_order_that_broke_off_is_an_error(make: Make) -> None:
    """Half an inventory must not pass for a whole one."""
    location = RemoteLocation("memory")
    backend = make(BrokenListing(location), location)
    await write(backend, [0])

    with pytest.raises(TransportError, match="broke off"):
        list(backend.entries())


async def test_a_comparison_without_listings_leaves_connections_to_fetches(tmp_path: Path) -> None:
    """A few chunks are asked for at once, the rest by the next call: none waits for its turn until its time is over."""
    location = parse_remote(tmp_path.as_uri())
    store = GatedHeads(location, connect(location, timeout_s=TIMEOUT_S, environ={}))
    calls = GuardedCalls("test://", timeout_s=TIMEOUT_S, slots=REMOTE_WIDTH)
    backend = ObjectStoreBackend(location, store, calls)
    keys = [key(number) for number in range(2 * REMOTE_WIDTH)]
    await write(backend, range(2 * REMOTE_WIDTH))
    comparing = asyncio.create_task(backend.sizes(keys))
    while not store.held:
        await asyncio.sleep(0)
    body = await backend.fetch(keys[-1], len(BLOB), timeout_s=TIMEOUT_S)
    store.gate.set()
    first = await comparing

    assert body is not None
    assert bytes(body) == BLOB
    assert store.held == HEADS_AT_ONCE < REMOTE_WIDTH
    assert first == [len(BLOB)] * HEADS_AT_ONCE
    backend.close()


async def test_a_head_that_fails_ends_the_others(tmp_path: Path) -> None:
    """None goes on beside those of the next call."""
    location = parse_remote(tmp_path.as_uri())
    store = GatedHeads(location, connect(location, timeout_s=TIMEOUT_S, environ={}))
    backend = ObjectStoreBackend(location, store, GuardedCalls("test://", timeout_s=TIMEOUT_S, slots=REMOTE_WIDTH))
    store.failing = key(3).path

    with pytest.raises(TransportError, match="it is what it is"):
        await backend.sizes([key(number) for number in range(8)])
    await asyncio.sleep(0)

    assert (store.held, store.cut_off) == (7, 7)
    backend.close()


async def test_what_a_killed_writer_left_is_no_chunk(tmp_path: Path) -> None:
    """A file that was never given its name is not listed, not read, and in nobody's way."""
    backend = open_remote(StorageConfig(remote=tmp_path.as_uri()))
    assert backend is not None
    leftover = tmp_path / f"{key(1).path}#1"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")

    found = list(backend.entries()), await backend.fetch(key(1), 4096, timeout_s=TIMEOUT_S)
    stored = await backend.store(key(1), BLOB, keep_all, timeout_s=TIMEOUT_S)

    assert found == ([], None)
    assert stored == "new"
    assert [entry.key for entry in backend.entries()] == [key(1)]
    backend.close()


LAST_ANSWER = """
import asyncio
import sys
from services.storage.backends import ChunkKey
from services.storage.backends.object_store import open_remote
from services.storage.config import StorageConfig
backend = open_remote(StorageConfig(remote=sys.argv[1]))
keys = [ChunkKey("ab" * 16, b"geometry", number.to_bytes(16, "big")) for number in range(20)]
async def write() -> None:
    for key in keys:
        await backend.store(key, bytes(4096), lambda nbytes, front: False, timeout_s=5.0)
asyncio.run(write())
print(len(list(backend.entries())))
"""


def test_a_process_that_ends_right_after_an_answer_ends_well(tmp_path: Path) -> None:
    """The library's threads do not abort a process that forgot to close the tier."""
    command = [sys.executable, "-c", LAST_ANSWER, (tmp_path / "store").as_uri()]
    root = Path(__file__).parents[4]

    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


@pytest.mark.parametrize("kind", KINDS)
async def test_a_shared_directory_that_is_unmounted_is_not_filled_below(make: Make, tmp_path: Path, kind: str) -> None:
    """Calls fail, with the reason and the way out, until it is mounted again."""
    with opened_disk(kind, tmp_path) as disk:
        location = parse_remote(f"file://{disk.path}")
        store = connect(location, timeout_s=TIMEOUT_S, environ={})
        backend = make(StoreCalls(location, store, disk.calls), location)
        await write(backend, [1])
        disk.unmount()
        with pytest.raises(TransportError, match=r"is not mounted\. The directory is used again once it is"):
            await write(backend, [2])
        with pytest.raises(TransportError, match="is not mounted"):
            await backend.fetch(key(1), len(BLOB), timeout_s=TIMEOUT_S)
        below = list(Path(disk.path).iterdir())
        disk.mount()

        assert below == []
        assert bytes(await backend.fetch(key(1), len(BLOB), timeout_s=TIMEOUT_S) or b"") == BLOB
        await write(backend, [3])
