"""A whole storage with a hidden pool, and the worker's side of it: hidden pages that are written and sealed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from services.storage.media import Media
from shared.ids import namespace_digest
from shared.memory import HostPoolView
from shared.memory.host_pool import nbytes_for
from shared.messages.pools import HIDDEN, KvGeometry
from shared.messages.storage_events import ChunksDropped, ChunksListed, HostPoolCreated
from shared.messages.storage_plans import CreateHostPool
from tests.integration.storage_cell import GEOMETRY, E, Sequence, StorageCell, running_storage

HIDDEN_GEOMETRY = msgspec.structs.replace(GEOMETRY, hidden=72, from_hidden=2)
"""Hidden states of all layers, which are wider than the KV: hidden chunks do not fit in buffers for KV."""

HIDDEN_PAGES = 48
OTHER = namespace_digest("other")


class HiddenCell:
    """The hidden pool of a running storage, as a worker maps it."""

    def __init__(self, cell: StorageCell, geometry: KvGeometry, pool: HostPoolView) -> None:
        self.cell = cell
        self.geometry = geometry
        self.pool = pool

    def write(self, sequence: Sequence, pages: list[int], *, seed: int = 0) -> npt.NDArray[np.uint8]:
        """Seal random bytes in these pages as that of the sequence from its root; returns it, [pages, units, bytes]."""
        random = np.random.default_rng(seed)
        for page, at in enumerate(pages):
            self.pool.pages[at] = random.integers(0, 256, self.pool.pages[at].shape, dtype=np.uint8)
            self.pool.seal_page(at, sequence.identity(page))
        return self.pool.pages[pages].copy()

    def wipe(self) -> None:
        """Nothing is left in any page."""
        self.pool.clear(slice(None))
        self.pool.pages[:] = 0

    def holds(self, sequence: Sequence, pages: list[int], expected: npt.NDArray[np.uint8], *, first: int = 0) -> bool:
        """Whether these pages verify as those of the sequence from page ``first`` on, and are these bytes."""
        for page, at in enumerate(pages):
            for unit in range(self.geometry.units):
                self.pool.verify_layer(at, unit, sequence.identity(first + page))
        return np.array_equal(self.pool.pages[pages], expected)


async def make_hidden_pool(cell: StorageCell, geometry: KvGeometry = HIDDEN_GEOMETRY) -> HiddenCell:
    """Order the hidden pool, and map it."""
    await cell.order(CreateHostPool(geometry=geometry))
    created = await cell.event(HostPoolCreated)
    assert (created.form, created.error) == (HIDDEN, "")
    assert created.handle is not None
    return HiddenCell(cell, geometry, HostPoolView.attach(created.handle))


@asynccontextmanager
async def running_with_hidden(
    prefix: str, media: Media, *, geometry: KvGeometry = HIDDEN_GEOMETRY, **settings: Any
) -> AsyncIterator[HiddenCell]:
    """A storage with host pool, a worker's pool and a hidden pool."""
    budget: dict[str, Any] = {"hidden_bytes": nbytes_for(geometry, HIDDEN_PAGES)}
    async with running_storage(prefix, media, geometry=geometry.as_kv, **(budget | settings)) as cell:
        yield await make_hidden_pool(cell, geometry)


async def told(cell: StorageCell, kind: type[E], count: int) -> dict[str, list[bytes]]:
    """The chunks that the next events of a kind name, by form and sorted, until there are ``count``."""
    assert kind in (ChunksListed, ChunksDropped)
    names: dict[str, list[bytes]] = {"kv": [], HIDDEN: []}
    while sum(len(of_form) for of_form in names.values()) < count:
        event = await cell.event(kind)
        chunks: bytes = event.chunks  # type: ignore[attr-defined]
        names[event.form] += [chunks[at : at + 16] for at in range(0, len(chunks), 16)]  # type: ignore[attr-defined]
    return {form: sorted(of_form) for form, of_form in names.items()}
