"""Rows that are often chosen come together, and every read gives what it gave before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from services.storage.backends import ChunkKey
from services.storage.paced_reads import PacedReads
from services.storage.sparse import reordering as reordering_module
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.reordering import Reordering
from services.storage.sparse.token_uses import TokenUses, by_share, expected_blocks
from services.storage.staging import Staging
from shared.errors import TransportError
from shared.ids import key_digest
from shared.messages.pools import KvGeometry
from tests.memory_backend import MemoryBackend
from tests.unit.storage.sparse.made_copies import CIPHER, Reading, copy_of, reading

ALICE = key_digest("alice")
LAYOUT = SparseLayout.of(KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=16, dtype="float16"))
BLOB = LAYOUT.blob_bytes(is_sealed=True)
SPREAD = list(range(0, 64, 4))
"""Tokens of the first chunk, each in a block of its own in the order of tokens."""


@dataclass
class _Work:
    found: Reading
    reordering: Reordering
    staging: Staging
    paced: list[float]

    async def read_until_due(self) -> int:
        """Read as one prompt after the other does; returns the bytes of the last read."""
        nbytes = 0
        while not self.reordering._is_due.is_set():
            for layer in range(2):
                is_right, nbytes = await self.found.kv_of(layer, SPREAD)
                assert is_right
        return nbytes


@asynccontextmanager
async def working(
    *, key_id: str = "", backend: MemoryBackend | None = None, buffers: int = 2, chunks: int = 1
) -> AsyncIterator[_Work]:
    """A disk with copies that are read, and who brings their rows in order; its pace is noted, not kept."""
    paced: list[float] = []

    async def sleep(seconds: float) -> None:
        paced.append(seconds)

    staging = Staging(buffers * BLOB, BLOB)
    learn: list[Reordering] = []
    async with reading(
        layout=LAYOUT,
        chunks=chunks,
        key_id=key_id,
        backend=backend,
        learn=lambda asked, reads, opened: learn[0].learn(asked, reads, opened),
    ) as found:
        made = Reordering(
            LAYOUT,
            found.disk,
            staging=staging,
            turns=found.turns,
            heads=found.heads,
            cipher=CIPHER,
            events=found.told,  # type: ignore[arg-type]
            pace=PacedReads(1, clock_s=lambda: 0.0, sleep=sleep),
        )
        learn.append(made)
        yield _Work(found, made, staging, paced)
        assert staging.taken == 0
    staging.close()


@pytest.mark.parametrize("key_id", ["", ALICE])
async def test_often_chosen_rows_come_together(key_id: str) -> None:
    """After as much was wasted as a rewriting moves, the same tokens take fewer blocks, and all reads give the same."""
    async with working(key_id=key_id) as work:
        before = await work.read_until_due()
        (key,) = work.found.keys

        await work.reordering.rewrite_due()

        await work.found.kv_of(0, [0])  # Tables are read anew.
        is_right, after = await work.found.kv_of(1, SPREAD)
        assert is_right
        assert (before, after) == (2 * 16 * 4096, 2 * 8 * 4096)
        assert work.reordering.rewritten == 1
        for tokens in ([5], list(range(64)), [0, 1, 62, 63]):
            assert (await work.found.kv_of(0, tokens))[0]
        assert (await work.found.keys_of(1, [0, 2], 3, 60))[0]
        assert (await work.found.keys_of(1, [7], 3, 60))[0]
        assert (await work.found.values_of(0, [1, 6], [[1, 2, 3], [4, 8, 63]]))[0]
        opened = work.found.heads.get(key, key_id)
        assert opened is not None
        assert sorted(opened.tables.mapping[:16].tolist()) == SPREAD


async def test_a_good_order_is_left_as_it_is() -> None:
    """Where nothing is to be gained no file is written, and it is looked at again only once as much was wasted."""
    async with working() as work:
        uses, (key,) = work.reordering._uses, work.found.keys
        equal = np.full(64, 0.25, np.float32)
        for _ in range(1000):
            uses.note(key, equal, 0)
        uses.note(key, equal, 2 * BLOB)

        await work.reordering.rewrite_due()

        assert work.reordering.rewritten == 0
        assert uses.most_wasteful(1) is None


async def test_a_copy_that_is_being_read_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new order waits a while for those who read, and is given up then; the next read makes it due again."""
    monkeypatch.setattr(reordering_module, "TURN_S", 0.0)
    async with working() as work:
        await work.read_until_due()
        async with work.found.turns.reading(work.found.keys):
            await work.reordering.rewrite_due()
            rewritten_meanwhile = work.reordering.rewritten
        await work.found.kv_of(0, SPREAD)
        is_due = work.reordering._is_due.is_set()
        await work.reordering.rewrite_due()

        assert (rewritten_meanwhile, is_due, work.reordering.rewritten) == (0, True, 1)
        assert (await work.found.kv_of(0, SPREAD))[0]


async def test_who_waits_to_write_goes_before_later_readers() -> None:
    """A copy that somebody reads at every moment is written all the same, and waits for none that came later."""
    turns, key, order = ChunkTurns(), LAYOUT.key("aa" * 16, b"k" * 16), list[str]()
    may_end = asyncio.Event()

    async def read(name: str, until: asyncio.Event | None = None) -> None:
        async with turns.reading([key]):
            order.append(name)
            if until is not None:
                await until.wait()

    async def write() -> None:
        async with turns.writing(key):
            order.append("write")

    first = asyncio.create_task(read("first", may_end))
    await asyncio.sleep(0)
    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    late = asyncio.create_task(read("late"))
    given_up = asyncio.create_task(write())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, writer, late)

    assert order == ["first", "write", "late"]
    assert turns.is_idle(key)


async def test_reads_wait_for_a_file_that_is_being_replaced() -> None:
    """So that none sees old tables over new rows."""
    async with working() as work:
        (key,) = work.found.keys
        async with work.found.turns.writing(key):
            late = asyncio.create_task(work.found.kv_of(0, SPREAD))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            has_begun = bool(work.found.turns._readers)

        assert (await late)[0]
        assert not has_begun


async def test_it_keeps_to_its_share_of_the_disk() -> None:
    """Each rewriting waits for what it reads and writes, at its own rate."""
    async with working() as work:
        await work.read_until_due()
        (key,) = work.found.keys
        await work.reordering.rewrite_due()

        assert work.paced == [pytest.approx(2 * work.found.disk.index.nbytes_of(key) - 0.05)]


async def test_without_memory_it_is_put_off() -> None:
    """Copies on their way come first."""
    async with working(buffers=1) as work:
        await work.read_until_due()
        await work.reordering.rewrite_due()

        assert work.reordering.rewritten == 0
        assert work.reordering._uses.most_wasteful(2 * BLOB) == work.found.keys[0]


async def test_a_bad_copy_is_quarantined() -> None:
    """A rewriting reads all of it: damage is found, told of, and never carried on."""
    backend = MemoryBackend(max_bytes=2**28)
    async with working(backend=backend) as work:
        await work.read_until_due()
        blob = bytearray(copy_of(work.found.chunks[0], LAYOUT))
        blob[LAYOUT.unit_at(1, 40, is_sealed=False)[0]] ^= 1
        backend.replace(work.found.keys[0], memoryview(blob), timeout_s=1.0)

        await work.reordering.rewrite_due()

        await work.found.disk.removals.drained()
        assert (work.found.told.gone, backend.quarantined) == (work.found.keys, 1)
        assert work.reordering.rewritten == 0


class _Refusing(MemoryBackend):
    """Fails to replace, without or with having done it."""

    is_done = False

    def replace(self, key: ChunkKey, blob: memoryview, *, timeout_s: float) -> bool:
        if self.is_done:
            super().replace(key, blob, timeout_s=timeout_s)
        raise TransportError("I/O error")


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_replacement_that_fails_harms_nothing(is_done: bool) -> None:
    """Whether the new file has the name or the old one, reads give the right bytes, by that file's tables."""
    backend = _Refusing(max_bytes=2**28)
    backend.is_done = is_done
    async with working(backend=backend) as work:
        await work.read_until_due()
        await work.reordering.rewrite_due()
        work.found.disk._clock_s = lambda: 1e9  # The disk is tried again.

        assert (await work.found.kv_of(0, SPREAD))[0]
        assert work.found.told.gone == []
        assert work.reordering.rewritten == 0


async def test_a_copy_that_went_is_forgotten() -> None:
    """It does not come back by being rewritten."""
    async with working() as work:
        await work.read_until_due()
        await work.found.disk.drop(work.found.keys)
        await work.reordering.rewrite_due()

        assert work.found.keys[0] not in work.found.disk
        assert len(work.reordering._uses) == 0


def test_expected_blocks_are_those_of_independent_choices() -> None:
    """The formula agrees with counting, and no order is better than the most often chosen first."""
    random = np.random.default_rng(2)
    shares = random.random(16).astype(np.float32) ** 3
    chosen = random.random((20_000, 16)) < shares

    counted = chosen.reshape(-1, 4, 4).any(axis=2).sum(axis=1).mean()
    best = expected_blocks(shares, by_share(shares), 4)
    others = [expected_blocks(shares, random.permutation(16).astype(np.uint32), 4) for _ in range(500)]

    assert expected_blocks(shares, np.arange(16, dtype=np.uint32), 4) == pytest.approx(counted, rel=0.02)
    assert best <= min(others)


def test_uses_are_averages_within_a_bound() -> None:
    """A token that is always chosen comes to 1, one that never is to 0; the last used chunks are remembered."""
    uses = TokenUses(max_chunks=2)
    keys = [LAYOUT.key("aa" * 16, bytes([number]) * 16) for number in range(3)]
    always = np.array([1.0, 0.0, 0.5], np.float32)
    for _ in range(2000):
        uses.note(keys[0], always, 1)
    uses.note(keys[1], always, 1)
    wasted = uses.note(keys[0], always, 5)
    uses.note(keys[2], always, 1)

    shares = uses.shares(keys[0])
    assert shares is not None
    assert shares.tolist() == pytest.approx([1.0, 0.0, 0.5], abs=1e-3)
    assert (wasted, len(uses)) == (2005, 2)
    assert uses.shares(keys[1]) is None
    assert uses.most_wasteful(2) == keys[0]
    uses.settled(keys[0])
    assert uses.most_wasteful(2) is None
    assert uses.most_wasteful(1) == keys[2]
