"""Reads of parts of KV: the right bytes, no more of the disk than they need, and nothing that is damaged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.chunk_keys import ChunkKeys, NoCipher
from services.storage.paced_reads import PacedReads
from services.storage.sparse import reader as reading_module
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.read_plan import gap_worth_reading
from shared.errors import IntegrityError, InvalidRequest, KeyMissing, NotFound, QueueFull, TransportError, Unavailable
from shared.ids import key_digest
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.sparse_reads import MOST_LAYERS
from tests.memory_backend import MemoryBackend
from tests.unit.storage.sparse.made_copies import LAYOUT, copy_of, reading

ALICE = key_digest("alice")
SHUFFLED = np.random.default_rng(3).permutation(64).tolist()

GEOMETRIES = [
    KvGeometry(layers=6, kv_heads=4, head_dim=8, page_size=16, dtype="float16"),
    KvGeometry(layers=2, kv_heads=1, head_dim=3, page_size=1, dtype="bfloat16"),
    KvGeometry(layers=1, kv_heads=5, head_dim=16, page_size=32, dtype="float32"),
    KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=64, dtype="float16"),
]


class _Held(MemoryBackend):
    """Reads of parts wait for a gate, fail as told, and are counted."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**28)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.ranges: list[tuple[int, int]] = []

    def read_ranges(
        self, key: ChunkKey, ranges: Sequence[tuple[int, int]], into: memoryview, *, first: int, timeout_s: float
    ) -> int:
        self.entered.set()
        assert self.gate.wait(20.0)
        self.ranges += ranges
        if self.error is not None:
            raise self.error
        return super().read_ranges(key, ranges, into, first=first, timeout_s=timeout_s)


@given(data=st.data())
@settings(max_examples=40)
def test_every_part_is_what_slicing_the_kv_gives(data: st.DataObject) -> None:
    """Keys of any heads, rows and values of any tokens: of every shape, in any order of rows, sealed or not, whichever
    gaps are read.
    """
    geometry = data.draw(st.sampled_from(GEOMETRIES))
    layout = SparseLayout.of(geometry, block_tokens=data.draw(st.sampled_from([0, 1, 8])))
    key_id = data.draw(st.sampled_from(["", ALICE]))
    order = data.draw(st.sampled_from([None, SHUFFLED]))
    gap_bytes = data.draw(st.sampled_from([0, BLOCK_BYTES, 5 * BLOCK_BYTES, 2**24]))
    heads = data.draw(st.lists(st.integers(0, geometry.kv_heads - 1), min_size=1, unique=True))
    layer = data.draw(st.integers(0, geometry.layers - 1))
    probes = data.draw(st.lists(st.integers(0, layout.probe_heads - 1), min_size=1, unique=True))
    layers = data.draw(st.integers(1, min(MOST_LAYERS, geometry.layers - layer)))
    start = data.draw(st.integers(0, 190))
    end = data.draw(st.integers(start + 1, 192))
    picked = st.lists(st.integers(0, 191), min_size=20, max_size=20, unique=True).map(sorted)
    tokens = data.draw(picked)
    of_heads = [data.draw(picked) for _ in heads]

    async def check() -> None:
        async with reading(layout=layout, key_id=key_id, order=order, gap_bytes=gap_bytes) as found:
            assert (await found.codes_of(layer, probes, start, end, layers=layers))[0]
            assert (await found.keys_of(layer, heads, start, end))[0]
            assert (await found.kv_of(layer, tokens))[0]
            assert (await found.values_of(layer, heads, of_heads))[0]

    asyncio.run(check())


async def test_keys_of_several_layers_are_one_read_of_each_chunk() -> None:
    """A head's codes of all layers lie side by side, so that nothing between them is read."""
    layout = SparseLayout.of(KvGeometry(layers=5, kv_heads=8, head_dim=60, page_size=16, dtype="float32"))
    backend = _Held()
    async with reading(layout=layout, backend=backend) as found:
        await found.kv_of(0, [0])  # Headers and tables.
        backend.ranges.clear()

        is_right, nbytes = await found.codes_of(1, [1], 0, 192, layers=4)

    assert is_right
    assert len(backend.ranges) == 3
    assert nbytes == 3 * 4 * layout.probe_unit_bytes == 3 * 4 * 64 * (60 + 4)


async def test_a_run_may_begin_below_the_root() -> None:
    """Positions count from the root, also where the first chunks are not asked for."""
    async with reading() as found:
        names = b"".join(chunk.header.identity for chunk in found.chunks[1:])
        tokens = [64, 100, 191]

        came, _ = await found.read(found.call("kv", 1, tokens=[tokens], depth=64, chunks=names))

    assert came == found.kv[1][:, tokens].tobytes()


async def test_only_what_is_needed_is_read() -> None:
    """Blocks of the chosen rows, K and V, and tables once: whole blocks of the disk, and side by side in one call."""
    layout = SparseLayout.of(KvGeometry(layers=2, kv_heads=8, head_dim=128, page_size=64, dtype="float16"))
    backend = _Held()
    async with reading(layout=layout, backend=backend) as found:
        _, first = await found.kv_of(1, [0])
        backend.ranges.clear()
        _, both = await found.kv_of(1, [0, 1, 2, 3, 66])

        head = layout.header_bytes(is_sealed=False)
        assert first == 3 * head + 2 * 4096
        assert both == 2 * (2 * 4096 + 4096)
        rows_at, _ = layout.unit_at(1, layout.probe_heads, is_sealed=False)
        values_at = rows_at + layout.blocks * 4096
        assert sorted(backend.ranges) == sorted(
            [(rows_at, 8192), (values_at, 8192), (rows_at + 4096, 4096), (values_at + 4096, 4096)]
        )
        codes = 2 * 3 * 4096  # Of two heads: 64 tokens of 132 bytes each, which begin and end within blocks.
        assert (await found.codes_of(1, [0, 2], 0, 64))[1] == codes
        assert (await found.keys_of(1, [0, 7], 0, 2))[1] == 4096
        assert (found.reader.reads, found.reader.disk_bytes) == (4, first + both + codes + 4096)


async def test_a_scattered_quarter_takes_few_large_reads() -> None:
    """Of a prefix of 4,096 tokens: gaps that cost less than another read are read too, so that there is one read for
    each chunk and layer, where parts alone would take sixteen.
    """
    layout = SparseLayout.of(KvGeometry(layers=1, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"))
    chosen = np.sort(np.random.default_rng(4).choice(4096, 1024, replace=False)).tolist()
    reads = {}
    for gap_bytes in (0, gap_worth_reading(2.5e9)):
        backend = _Held()
        async with reading(layout=layout, backend=backend, chunks=64, gap_bytes=gap_bytes) as found:
            await found.kv_of(0, [0])  # Headers and tables.
            backend.ranges.clear()

            is_right, nbytes = await found.kv_of(0, chosen)

            assert is_right
            assert nbytes == sum(size for _, size in backend.ranges)
        reads[gap_bytes] = len(backend.ranges)

    assert list(reads.values()) == [1020, 64]


async def test_a_limited_disk_is_waited_for_with_exactly_what_is_read() -> None:
    """Also where what is wanted is less than a block of the disk."""
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    pace = PacedReads(BLOCK_BYTES, clock_s=lambda: 0.0, sleep=sleep)
    async with reading(chunks=1, pace=pace) as found:
        _, nbytes = await found.kv_of(0, [5])
        head = LAYOUT.header_bytes(is_sealed=False)

    assert nbytes == head + 2 * BLOCK_BYTES
    assert slept_s == [pytest.approx(head / BLOCK_BYTES - 0.05), pytest.approx(nbytes / BLOCK_BYTES - 0.05)]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("kv", {"namespace": "../etc"}),
        ("kv", {"chunks": b""}),
        ("kv", {"chunks": b"short"}),
        ("kv", {"chunks": bytes(32)}),
        ("kv", {"chunks": bytes(16 * (2**20 // 64 + 1))}),
        ("kv", {"depth": 32}),
        ("kv", {"depth": -64}),
        ("kv", {"depth": 64}),
        ("kv", {"layer": 3}),
        ("kv", {"layer": -1}),
        ("kv", {"tokens": b""}),
        ("kv", {"tokens": b"abc"}),
        ("kv", {"tokens": pack_int32([5, 5])}),
        ("kv", {"tokens": pack_int32([7, 5])}),
        ("kv", {"tokens": pack_int32([-1, 5])}),
        ("kv", {"tokens": pack_int32([5, 192])}),
        ("kv", {"tokens": pack_int32([5])}),
        ("kv", {"nbytes": 1}),
        ("values", {"heads": ()}),
        ("values", {"heads": (0, 0)}),
        ("values", {"heads": (0, 4)}),
        ("values", {"heads": (0,)}),
        ("values", {"tokens": pack_int32([1, 2, 3])}),
        ("keys", {"heads": (-1,)}),
        ("keys", {"start": 10}),
        ("keys", {"start": -1}),
        ("keys", {"end": 193}),
        ("keys", {"end": 2**40}),
        ("keys", {"layers": 2, "nbytes": 2 * 2 * 7 * LAYOUT.head_bytes}),
        ("codes", {"heads": (0, 3)}),
        ("codes", {"heads": ()}),
        ("codes", {"layers": 4}),
        ("codes", {"nbytes": 2 * 7 * LAYOUT.head_bytes}),
    ],
    ids=str,
)
async def test_what_cannot_be_asked_is_refused(part: str, change: dict[str, object]) -> None:
    """Whatever does not fit together is InvalidRequest, before anything is read or written."""
    backend = _Held()
    async with reading(backend=backend) as found:
        fields: dict[str, object] = {
            "keys": {"heads": [0, 1], "start": 3, "end": 10},
            "codes": {"heads": [0, 1], "start": 3, "end": 10},
            "kv": {"tokens": [[1, 5]]},
            "values": {"heads": [0, 1], "tokens": [[1, 5], [2, 3]]},
        }[part]  # type: ignore[assignment]
        sound = found.call(part, 0, **fields)  # type: ignore[arg-type]
        call = msgspec.structs.replace(sound, **change)
        into = memoryview(bytearray(call.nbytes))

        with pytest.raises(InvalidRequest):
            await found.reader.read(call, into)

    assert backend.ranges == []
    assert not any(into)


async def test_memory_of_another_size_is_refused() -> None:
    """So is memory that cannot be written."""
    async with reading() as found:
        call = found.call("kv", 0, tokens=[[1]])

        for into in (memoryview(bytearray(call.nbytes + 1)), memoryview(bytes(call.nbytes))):
            with pytest.raises(InvalidRequest):
                await found.reader.read(call, into)


async def test_a_copy_that_is_not_there_is_not_found() -> None:
    """Whether it never was, or its file went: the scheduler is told, and what is there stays."""
    async with reading() as found:
        stranger = found.call("kv", 0, tokens=[[1]], chunks=b"x" * 16)
        with pytest.raises(NotFound):
            await found.read(stranger)
        found.disk.backend.delete(found.keys[1], timeout_s=1.0)
        with pytest.raises(NotFound):
            await found.kv_of(0, [70])

        assert found.told.gone == [LAYOUT.key(found.chunks[0].header.namespace, b"x" * 16), found.keys[1]]
        assert [key in found.disk for key in found.keys] == [True, False, True]


async def test_a_bad_copy_is_quarantined_and_told_of() -> None:
    """A damaged unit is never served; other units of the copy, and other copies, were not touched by the read."""
    backend = MemoryBackend(max_bytes=2**28)
    async with reading(backend=backend) as found:
        assert (await found.kv_of(2, [3]))[0]
        blob = bytearray(copy_of(found.chunks[1]))
        blob[LAYOUT.unit_at(0, LAYOUT.probe_heads, is_sealed=False)[0]] ^= 1
        backend.replace(found.keys[1], memoryview(blob), timeout_s=1.0)
        assert (await found.kv_of(0, [3, 127, 130]))[0]

        with pytest.raises(IntegrityError) as caught:
            await found.kv_of(0, [3, 64, 130])

        await found.disk.removals.drained()
        assert caught.value.code == "wrong_checksum"
        assert (found.told.gone, backend.quarantined) == ([found.keys[1]], 1)
        assert [key in found.disk for key in found.keys] == [True, False, True]


async def test_a_copy_that_cannot_be_read_counts_as_gone() -> None:
    """The others are read as before."""
    backend = _Held()
    async with reading(backend=backend) as found:
        assert (await found.kv_of(0, [0]))[0]
        backend.error = TransportError("I/O error")
        with pytest.raises(TransportError, match="I/O error"):
            await found.kv_of(0, [0])
        backend.error = None
        last = found.call("kv", 0, tokens=[[150]], depth=128, chunks=found.chunks[2].header.identity)
        await found.read(last)

        assert found.told.gone == [found.keys[0]]
        assert found.keys[2] in found.disk


async def test_without_its_key_a_copy_stays() -> None:
    """A key that is gone says nothing about the disk."""
    async with reading(key_id=ALICE) as found:
        found.reader._keys.cipher = NoCipher()

        with pytest.raises(KeyMissing):
            await found.kv_of(0, [0])

        assert all(key in found.disk for key in found.keys)
        found.reader._keys.cipher = ChunkKeys(None).cipher


async def test_what_is_read_is_held_and_counts_as_used() -> None:
    """It is not evicted under the read, nor written; afterwards both may be. One layer of a request is its use."""
    backend = _Held()
    async with reading(chunks=2, backend=backend) as found:
        backend.gate.clear()
        running = asyncio.create_task(found.kv_of(0, [0]))
        await asyncio.to_thread(backend.entered.wait, 20.0)

        assert found.disk.index.shrink(0) == ()
        assert not found.turns.is_idle(found.keys[0])
        backend.gate.set()
        assert (await running)[0]
        heat = {key: chunk.uses for key, chunk in zip(found.keys, found.disk.index._chunks.values(), strict=True)}
        assert (await found.kv_of(1, [0]))[0]
        assert [chunk.uses for chunk in found.disk.index._chunks.values()] == list(heat.values()) == [1, 1]
        assert found.turns.is_idle(found.keys[0])
        assert len(found.disk.index.shrink(0)) == 2


async def test_calls_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those within it are carried out."""
    monkeypatch.setattr(reading_module, "MAX_READS", 1)
    backend = _Held()
    async with reading(backend=backend) as found:
        backend.gate.clear()
        running = asyncio.create_task(found.kv_of(0, [0]))
        await asyncio.to_thread(backend.entered.wait, 20.0)
        with pytest.raises(QueueFull):
            await found.kv_of(0, [0])
        backend.gate.set()

        assert (await running)[0]
        assert len(found.reader) == 0


async def test_a_stop_cuts_off_what_waits_for_a_limited_disk() -> None:
    """It is answered, has ended when the stop returns, and nothing new begins."""
    never = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await never.wait()

    async with reading(pace=PacedReads(1, sleep=sleep)) as found:
        running = asyncio.create_task(found.kv_of(0, [0]))
        while not found.reader._limits:
            await asyncio.sleep(0)
        await found.reader.stop()

        for late in (running, asyncio.create_task(found.kv_of(0, [0]))):
            with pytest.raises(Unavailable, match="stopping"):
                await late
        assert found.turns.is_idle(found.keys[0])


async def test_a_call_that_is_cut_off_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, though the disk may hang, and what is read later comes to nobody: its memory is free again."""
    backend = _Held()
    async with reading(backend=backend) as found:
        assert (await found.kv_of(0, [0]))[0]
        backend.gate.clear()
        backend.entered.clear()
        call = found.call("kv", 0, tokens=[[0]])
        memory = bytearray(b"\xee" * call.nbytes)
        running = asyncio.create_task(found.reader.read(call, memoryview(memory)))
        await asyncio.to_thread(backend.entered.wait, 20.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        is_in_use = len(found.disk.directories.abandoned)
        backend.gate.set()
        while len(found.disk.directories.abandoned):
            await asyncio.sleep(0)

        assert is_in_use == 1
        assert (await found.kv_of(0, [0]))[0]
        assert memory == b"\xee" * call.nbytes


async def test_a_copy_that_was_written_anew_is_read_by_its_own_tables() -> None:
    """Dropped and written again in another order, it is not judged by what was remembered of the old one."""
    async with reading() as found:
        assert (await found.kv_of(0, [70]))[0]
        await found.disk.drop([found.keys[1]])
        await found.put(found.chunks[1], copy_of(found.chunks[1], order=SHUFFLED))

        assert (await found.kv_of(0, [70, 71]))[0]
        assert len(found.heads) == 3


async def test_tables_are_forgotten_beyond_their_bound() -> None:
    """The last used stay."""
    async with reading() as found:
        await found.kv_of(0, [0])
        each = found.heads.nbytes // 3
        found.heads._max_bytes = 2 * each
        await found.kv_of(0, [0])

        assert [found.heads.get(key, "") is None for key in found.keys] == [False, False, False]
        opened = found.heads.get(found.keys[0], "")
        assert opened is not None
        found.heads.put(found.keys[0], opened)

        assert [found.heads.get(key, "") is None for key in found.keys] == [False, True, False]
        assert found.heads.nbytes == 2 * each
