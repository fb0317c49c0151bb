"""What is on the disk alone is found by comparing, some chunks at a time, until the store has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.storage import reconciliation as reconciling
from services.storage.backends import ChunkKey
from services.storage.chunk_names import ChunkNames
from services.storage.reconciliation import LONGEST_PAUSE_S, PAUSE_S, Reconciliation
from services.storage.uploads import Upload
from shared.errors import KeyMissing, TransportError
from shared.ids import key_digest
from tests.chunk_makers import SMALL, MadeChunk, make_chain
from tests.unit.storage.made_ciphers import make_cipher
from tests.unit.storage.upload_cell import NBYTES, GatedStore, UploadCell, VirtualTime, uploading

CHAIN = make_chain(40, seed=5)


class _Store(GatedStore):
    """Counts what it is asked for, and does not answer as often as told."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[ChunkKey]] = []
        self.silent = 0

    async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
        self.asked.append(list(keys))
        if self.silent:
            self.silent -= 1
            raise TransportError("no answer in time")
        return await super().sizes(keys)


@asynccontextmanager
async def _comparing(
    store: _Store, chain: list[MadeChunk] = CHAIN, names: ChunkNames | None = None, **settings: Any
) -> AsyncIterator[tuple[UploadCell, Reconciliation, VirtualTime]]:
    """A disk that holds a chain, listed, and a comparison that is wanted by nobody yet."""
    time, is_listed = VirtualTime(), asyncio.Event()
    is_listed.set()
    async with uploading(store, chain, **settings) as cell:
        names = names or ChunkNames()
        made = Reconciliation(cell.disk, cell.remote, cell.uploads, names, clock_s=lambda: time.now_s, sleep=time.sleep)
        task = asyncio.create_task(made.run(is_listed))
        try:
            yield cell, made, time
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_all_are_there(store: _Store, chain: list[MadeChunk] = CHAIN) -> None:
    async with asyncio.timeout(20.0):
        while len(list(store.entries())) < len(chain):
            await asyncio.sleep(0.001)


async def test_what_is_on_the_disk_alone_is_uploaded() -> None:
    """And nothing else: what the store has in its size is left alone, and what it has cut short is replaced."""
    store = _Store()
    for place, chunk in enumerate(CHAIN[:10]):
        store.put(chunk.key, chunk.blob[: 4096 if place == 3 else None], stripe=0, timeout_s=1.0)
    async with _comparing(store) as (cell, reconciliation, _):
        reconciliation.want()
        await _until_all_are_there(store)
        await cell.idle()

        assert (reconciliation.found, cell.remote.uploaded, cell.remote.replaced) == (31, 31, 1)
        assert {entry.nbytes for entry in store.entries()} == {NBYTES}
        assert len(reconciliation) == 0


async def test_more_than_the_line_holds_is_uploaded_all_the_same() -> None:
    """What did not fit is found by the next comparison, after a pause."""
    store = _Store()
    async with _comparing(store, max_waiting=4) as (cell, _, time):
        store.gate.clear()
        for chunk in CHAIN:
            cell.uploads.add(Upload(chunk.key, NBYTES))
        left_out = cell.uploads.left_out
        store.gate.set()
        await _until_all_are_there(store)
        await cell.idle()

        assert left_out == len(CHAIN) - 4
        assert time.slept_s == [PAUSE_S]


async def test_a_comparison_that_the_store_breaks_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that were compared are not asked for again; pauses grow until the store answers."""
    monkeypatch.setattr(reconciling, "AT_ONCE", 10)
    store = _Store()
    async with _comparing(store) as (cell, reconciliation, time):
        store.silent = 3
        reconciliation.want()
        await _until_all_are_there(store)
        await cell.idle()

        assert time.slept_s == [1.0, 2.0, 4.0]
        first, *others = store.asked
        assert others[:3] == [first] * 3
        assert [key for batch in others[2:] for key in batch] == sorted(chunk.key for chunk in CHAIN)


async def test_what_the_store_has_answered_is_not_asked_again() -> None:
    """A store that answers for a few at once is asked for the rest; after a failure, for the same few."""

    class Few(_Store):
        async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
            return (await super().sizes(keys))[:16]

    store = Few()
    async with _comparing(store) as (cell, reconciliation, time):
        store.silent = 1
        reconciliation.want()
        await _until_all_are_there(store)
        await cell.idle()

        assert time.slept_s == [1.0]
        assert [len(keys) for keys in store.asked] == [40, 40, 24, 8]
        assert (reconciliation.passes, reconciliation.found) == (1, 40)


async def test_a_key_that_goes_meanwhile_holds_up_no_other_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of its tenant cannot be named any more; the comparison goes on."""
    mine, other = make_chain(4, seed=7), make_chain(4, seed=8, model="other")
    cipher = make_cipher(leaving=1, staying=2)
    names = ChunkNames(cipher)
    for chain, salt in ((mine, "staying"), (other, "leaving")):
        names.learn(chain[0].key.namespace, key_digest(salt))

    class Naming(_Store):
        """Names chunks as an object store does."""

        async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
            monkeypatch.setattr(cipher, "hide", hide)
            return await super().sizes([names.at_rest(key) for key in keys])

    def hide(key_id: str, identity: bytes, hide: Callable[[str, bytes], bytes] = cipher.hide) -> bytes:
        if key_id == key_digest("leaving"):
            raise KeyMissing("its tenant is gone")
        return hide(key_id, identity)

    store = Naming()
    async with _comparing(store, [*mine, *other], names) as (cell, reconciliation, time):
        reconciliation.want()
        async with asyncio.timeout(20.0):
            while not (reconciliation.passes or time.slept_s):
                await asyncio.sleep(0.001)

        assert (reconciliation.passes, time.slept_s) == (1, [])
        await cell.idle()
        assert {chunk.key for chunk in mine} <= {entry.key for entry in store.entries()}


async def test_pauses_grow_while_uploads_fail() -> None:
    """A store that takes nothing is compared ever more rarely, and caught up with when it takes something again."""
    store = _Store()
    store.failures = 10**9
    chain = CHAIN[:1]
    async with _comparing(store, chain) as (_, reconciliation, time):
        reconciliation.want()
        async with asyncio.timeout(20.0):
            while len(time.slept_s) < 9:
                await asyncio.sleep(0.001)
        store.failures = 0
        await _until_all_are_there(store, chain)

        assert time.slept_s[:9] == [min(LONGEST_PAUSE_S, PAUSE_S * 2**count) for count in range(9)]


async def test_what_is_dropped_meanwhile_is_not_uploaded() -> None:
    """From the store, or from the disk; the rest is."""
    store = _Store()
    other = make_chain(4, seed=6, model="other")
    async with _comparing(store, [*CHAIN[:4], *other]) as (cell, reconciliation, _):
        await cell.disk.drop([CHAIN[0].key])
        store.gate.clear()
        asking = asyncio.Event()
        answering = asyncio.Event()
        compare = store.sizes

        async def sizes(keys: Sequence[ChunkKey]) -> list[int]:
            asking.set()
            await answering.wait()
            return await compare(keys)

        store.sizes = sizes  # type: ignore[method-assign]
        reconciliation.want()
        await asking.wait()
        reconciliation.forget(CHAIN[0].key.namespace)
        await cell.disk.drop([other[0].key])
        answering.set()
        store.gate.set()
        await _until_all_are_there(store, other[1:])
        await cell.idle()

        assert sorted(entry.key for entry in store.entries()) == sorted(chunk.key for chunk in other[1:])


async def test_there_is_a_comparison_for_each_shape_that_opens() -> None:
    """The first one finds nothing of a shape that is not open yet."""
    store = _Store()
    async with _comparing(store) as (cell, reconciliation, _):
        cell.close_shape(SMALL)
        reconciliation.want()
        async with asyncio.timeout(20.0):
            while reconciliation._is_wanted:
                await asyncio.sleep(0.001)
        before = list(store.asked)
        cell.open_shape(SMALL)
        reconciliation.want()
        await _until_all_are_there(store)

        assert before == []
