"""Reads, drops and new copies of the same chunks at once: reads give the right bytes, or find nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from services.storage.backends.disk import DiskBackend
from services.storage.sparse.copies import SparseCopies
from shared.errors import NotFound
from shared.ids import key_digest
from tests.unit.storage.sparse.made_copies import LAYOUT, Reading, copying, reading

ROUNDS = 10
READS = 8  # That succeed between two drops.


async def _read_on(found: Reading, chance: random.Random, met: list[bool], is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        layer = chance.randrange(3)
        tokens = sorted(chance.sample(range(192), 40))
        try:
            met.append((await found.kv_of(layer, tokens))[0])
            met.append((await found.keys_of(layer, [0, 3], 10, 150))[0])
        except NotFound:
            await asyncio.sleep(0)


async def _drop_and_copy(found: Reading, copies: SparseCopies, chance: random.Random, met: list[bool]) -> None:
    for _ in range(ROUNDS):
        chunk = chance.choice(found.chunks)
        await found.disk.drop([LAYOUT.key(chunk.header.namespace, chunk.header.identity)])
        copy = await copies.make(chunk.header, chunk.blob, found.key_id)
        assert copy is not None
        await copies.finish(copy, is_kept=True)
        enough = len(met) + READS
        while len(copies) or len(met) < enough:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("key_id", "seed"), [("", 0), ("", 1), (key_digest("alice"), 2)])
async def test_whatever_overlaps_reads_are_right(tmp_path: Path, key_id: str, seed: int) -> None:
    """Nothing is taken for damaged that is not, and nothing wrong is ever given."""
    chance, met = random.Random(seed), list[bool]()
    async with (
        reading(backend=DiskBackend([str(tmp_path)]), key_id=key_id) as found,
        copying(found, buffers=6, key_id=key_id) as (copies, _),
    ):
        is_over = asyncio.Event()
        readers = [asyncio.create_task(_read_on(found, random.Random(chance.random()), met, is_over)) for _ in range(4)]
        await _drop_and_copy(found, copies, chance, met)
        is_over.set()
        await asyncio.gather(*readers)
        while len(found.disk.directories.abandoned):
            await asyncio.sleep(0)  # What was cut off in a thread uses its buffers until it ends.

        assert all(met)
        assert copies.written > 0
        assert found.disk.quarantined == 0
    found.disk.backend.close()
