"""Orders of both forms that overlap, over two small disks: whatever happens, nothing wrong is served or told."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.storage.backends.disk import DiskBackend
from services.storage.media import Media
from shared.chunks import geometry_id
from shared.codec import Input
from shared.ids import namespace_digest, split_digests
from shared.memory.host_pool import nbytes_for
from shared.messages.pools import HIDDEN, ChunkForm
from shared.messages.storage_events import ChunksDropped, ChunksFetched, ChunksListed, ChunksSaved
from shared.messages.storage_plans import CancelFetch, DropChunks, FetchChunks, PinChunks, SaveChunks, StorageOrder
from tests.integration.storage_cell import BLOB_BYTES, GEOMETRY, Sequence, StorageCell, flip_byte
from tests.integration.storage_hidden_cell import HIDDEN_GEOMETRY, HiddenCell, running_with_hidden
from tests.memory_backend import MemoryBackend

pytestmark = pytest.mark.integration

COUNT = 10
PAGES = 16
"""Of one sequence."""

QUOTA = 2**20
FORMS: tuple[ChunkForm, ChunkForm] = ("kv", HIDDEN)


class _Scenario:
    """Sequences with KV in device pages and hidden states in pages of their own, and what was ordered."""

    def __init__(self, state: HiddenCell, random: Random) -> None:
        self.state = state
        self.cell: StorageCell = state.cell
        self.random = random
        self.sequences = [
            Sequence.make(number, 4, namespace=namespace_digest(f"tenant-{number % 2}")) for number in range(COUNT)
        ]
        self.device = [[random.randrange(64) for _ in range(PAGES)] for _ in range(COUNT)]
        self.written: list[npt.NDArray[np.uint8]] = [
            state.write(sequence, self.hidden_pages(number), seed=number)
            for number, sequence in enumerate(self.sequences)
        ]
        self.forms: dict[int, ChunkForm] = {}  # Of saves and fetches, by their ids.

    def hidden_pages(self, number: int) -> list[int]:
        """Where the hidden states of a sequence lie; the pages behind those of all sequences are for fetches."""
        return list(range(number * PAGES, (number + 1) * PAGES))

    async def order(self, order: StorageOrder) -> None:
        if isinstance(order, SaveChunks):
            self.forms[order.save_id] = order.form
        elif isinstance(order, FetchChunks):
            self.forms[order.fetch_id] = order.form
        await self.cell.order(order)

    async def save(self, number: int, form: ChunkForm) -> None:
        first = self.random.choice([0, 0, 1, 3])
        pages = (self.device[number] if form == "kv" else self.hidden_pages(number))[first * 4 :]
        where = {"device" if form == "kv" else "host": pages}
        value = float(self.random.randrange(20))
        await self.order(self.cell.save_order(self.sequences[number], first=first, form=form, value=value, **where))  # type: ignore[arg-type]

    async def fetch(self, number: int, form: ChunkForm, *, is_cancelled: bool) -> bool:
        """Whether what was served is what was saved, bit by bit."""
        sequence = self.sequences[number]
        into = list(range(PAGES)) if form == "kv" else self.hidden_pages(COUNT)
        order = self.cell.fetch_order(sequence, into, form=form)
        await self.order(order)
        if is_cancelled:
            await self.order(CancelFetch(fetch_id=order.fetch_id))
        count = 4 * (await self.cell.fetched(order.fetch_id)).chunks
        if form == "kv":
            return self.cell.holds(sequence, list(range(count)), into[:count], self.device[number][:count])
        return self.state.holds(sequence, into[:count], self.written[number][:count])

    def catalogue(self, events: list[Input]) -> dict[ChunkForm, set[bytes]]:
        """What the scheduler would take the disk to hold."""
        held: dict[ChunkForm, set[bytes]] = {"kv": set(), HIDDEN: set()}
        for event in events:
            match event:
                case ChunksSaved():
                    of_form = held[self.forms[event.save_id]]
                    of_form -= set(split_digests(event.dropped))
                    of_form |= set(split_digests(event.chunks))
                case ChunksListed():
                    held[event.form] |= set(split_digests(event.chunks))
                case ChunksDropped():
                    held[event.form] -= set(split_digests(event.chunks))
                case ChunksFetched():
                    held[self.forms[event.fetch_id]] -= set(split_digests(event.missing))
                case _:
                    pass
        return held


async def _act(scenario: _Scenario, directory: Path) -> None:
    random, number = scenario.random, scenario.random.randrange(COUNT)
    form, sequence = random.choice(FORMS), scenario.sequences[number]
    match random.randrange(9):
        case 0 | 1 | 2 | 3:
            await scenario.save(number, form)
            if random.random() < 0.5:
                await scenario.cell.idle()
        case 4 | 5 | 6:
            assert await scenario.fetch(number, form, is_cancelled=random.random() < 0.3)
        case 7:
            await scenario.order(PinChunks(chunks=sequence.names[0], is_pinned=random.random() < 0.5))
            if random.random() < 0.1:
                await scenario.order(DropChunks(namespace=sequence.namespace, tiers=("disk",)))
        case 8:
            await scenario.cell.idle()  # Nothing is being deleted now.
            files = sorted(directory.rglob("chunks/**/*.chunk"))
            if files:
                file = random.choice(files)
                flip_byte(file, random.randrange(file.stat().st_size))


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_overlaps_what_is_served_is_right_in_both_forms(prefix: str, tmp_path: Path, seed: int) -> None:
    """Random saves, fetches, cancels, drops, pins and bit rot of KV and hidden states over a small quota and few
    buffers: each page that is served is the right one of its form, and what the events tell of each form is in the end
    what the disk holds of it.
    """
    store = MemoryBackend(max_bytes=2**30) if seed % 2 else None
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    disk = DiskBackend([str(directory) for directory in directories])
    budget = nbytes_for(HIDDEN_GEOMETRY, (COUNT + 1) * PAGES)
    limits: dict[str, Any] = {"disk_kv_bytes": QUOTA, "staging_bytes": 2**20, "io_threads": 3, "max_saves": 16}
    async with running_with_hidden(prefix, Media(disk, store), hidden_bytes=budget, **limits) as state:
        scenario = _Scenario(state, Random(seed))
        filler = Sequence.make(99, QUOTA // BLOB_BYTES - 16)
        await scenario.order(
            state.cell.save_order(filler, device=[page % 64 for page in range(filler.pages)], value=1e9)
        )
        await scenario.cell.idle()
        for _ in range(70):
            await _act(scenario, tmp_path)
        counters = await scenario.cell.idle()
        await state.cell.stop()
        keys = [entry.key for entry in disk.entries()]
        told = scenario.catalogue([*state.cell.seen, *await state.cell.rest()])

    for kept, geometry in ((told["kv"], GEOMETRY), (told[HIDDEN], HIDDEN_GEOMETRY)):
        assert kept == {key.identity for key in keys if key.geometry == geometry_id(geometry)}
    assert counters["disk_chunks"] == len(keys)
    assert counters["disk_bytes"] <= QUOTA
    assert counters["chunks_evicted"] > 0
    assert 0 < counters["hidden_chunks_saved"] < counters["chunks_saved"]
