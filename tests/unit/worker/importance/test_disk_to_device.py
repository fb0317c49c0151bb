"""From sparse copies on a disk to tensors: both services' real parts, joined by a bus and shared memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from bench.stored_prefix import StoredPrefix
from services.storage.sparse_calls import SparseCalls
from services.worker.importance.disk_prefix import DiskPrefix
from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.read_buffers import ReadBuffers
from services.worker.importance.storage_calls import StorageCalls
from services.worker.kv.device_pool import TORCH_DTYPES
from shared import subjects
from shared.errors import SparsePrefixLost
from shared.ids import key_digest
from shared.memory import unlink_all
from shared.messages.requests import Importance
from shared.messages.worker_plans import SparsePrefix
from tests.memory_bus import MemoryBroker
from tests.run_name import RUN
from tests.unit.storage.sparse.made_copies import GEOMETRY, Reading, reading

START, DEPTH, END = 80, 64, 192


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit by bit: the bytes on the disk are random, and some are no numbers."""
    return torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


@asynccontextmanager
async def read_by_a_worker(disk: Reading) -> AsyncIterator[tuple[DiskPrefix, StoredPrefix]]:
    """Tokens from the middle of the second chunk on: as a worker reads them, and as they are."""
    prefix = f"{RUN}-{secrets.token_hex(4)}"
    broker = MemoryBroker()
    storage, worker = broker.connect("storage"), broker.connect("worker")
    calls = SparseCalls(lambda: disk.reader, prefix)
    await storage.serve(subjects.rpc("storage", "sparse", "s"), calls.answer)
    reads = DiskReads(
        ReadBuffers(prefix, 4 * 2048, slots=4), StorageCalls(worker), GEOMETRY, torch.device("cpu"), timeout_s=20.0
    )
    sparse = SparsePrefix(
        storage_id="s",
        namespace=disk.chunks[0].header.namespace,
        start=START,
        end=END,
        depth=DEPTH,
        chunks=b"".join(chunk.header.identity for chunk in disk.chunks[1:]),
        pages=b"",
        importance=Importance(ratio=0.5),
        key_id=disk.key_id,
    )
    kv = torch.from_numpy(disk.kv).view(TORCH_DTYPES[GEOMETRY.dtype])
    try:
        yield DiskPrefix(sparse, reads), StoredPrefix(kv[:, :, START:END], range(3), START)
    finally:
        await reads.close()
        await storage.close()
        calls.close()
        unlink_all(prefix)


@pytest.mark.parametrize("key_id", ["", key_digest("alice")])
async def test_what_the_disk_holds_arrives(key_id: str) -> None:
    """Keys of probe heads and of others, K and V of chosen tokens, V by head; sealed at rest or not; rows reordered."""
    order = np.random.default_rng(3).permutation(64).tolist()
    tokens = torch.tensor([80, 81, 95, 127, 128, 160, 191])
    by_head = torch.stack([tokens[head : head + 4] for head in range(GEOMETRY.kv_heads)])
    async with reading(key_id=key_id, order=order) as disk, read_by_a_worker(disk) as (prefix, stored):
        for layer in range(GEOMETRY.layers):
            for heads in ((0, 1, 2), (3,)):
                keys, nbytes = await asyncio.to_thread(prefix.probe_keys, layer, heads, 90)
                expected, expected_nbytes = stored.probe_keys(layer, heads, 90)
                assert torch.equal(keys.nan_to_num(), expected.nan_to_num())
                assert torch.equal(keys.isnan(), expected.isnan())
                assert nbytes == expected_nbytes
            assert same(await asyncio.to_thread(prefix.keys, layer, 90), stored.keys(layer, 90))
            kv = await asyncio.to_thread(prefix.gather, layer, tokens)
            assert same(kv, stored.gather(layer, tokens))
            values = await asyncio.to_thread(prefix.values_by_head, layer, by_head)
            assert same(values, stored.values_by_head(layer, by_head))

        assert 0 < prefix.disk_bytes == disk.reader.disk_bytes


async def test_a_copy_that_is_gone_is_an_error_of_the_prefix() -> None:
    """Nothing else of it is used either."""
    async with reading() as disk, read_by_a_worker(disk) as (prefix, stored):
        disk.disk.index.forget(disk.keys[2])

        with pytest.raises(SparsePrefixLost, match="not_found"):
            await asyncio.to_thread(prefix.gather, 0, torch.tensor([80, 150]))
        here = await asyncio.to_thread(prefix.gather, 0, torch.tensor([80, 100]))

        assert same(here, stored.gather(0, torch.tensor([80, 100])))
