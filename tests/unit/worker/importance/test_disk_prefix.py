"""A prefix on the disk, read through a storage: the same KV as from memory, or an error, and never another's bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stored_prefix import StoredPrefix
from services.storage import sparse_calls
from services.worker.importance.disk_prefix import DiskPrefix
from services.worker.importance.read_buffers import ReadBuffers
from shared.chunks import chunk_tokens
from shared.errors import ConfigError, IntegrityError, InvalidRequest, NotFound, SparsePrefixLost, ThermoclineError
from shared.importance import PROBE_HEADS
from shared.memory.segment import SHM_DIRECTORY
from shared.messages.pools import KvGeometry
from shared.messages.sparse_reads import MOST_LAYERS, code_bytes
from tests.unit.worker.importance.sparse_wire import GEOMETRY, TOKEN_BYTES, SparseWire, made_kv, sparse_prefix

MakeWire = Callable[..., SparseWire]


@pytest.fixture
def wire() -> Iterator[SparseWire]:
    """256 tokens, and two slots of eight tokens each."""
    made = SparseWire(made_kv(GEOMETRY, 256), slot_bytes=8 * TOKEN_BYTES, slots=2)
    yield made
    made.close()


@pytest.fixture
def make_wire() -> Iterator[MakeWire]:
    made: list[SparseWire] = []

    def make(*args: object, **kwargs: object) -> SparseWire:
        made.append(SparseWire(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def same_keys(disk: DiskPrefix, stored: StoredPrefix, layer: int, heads: Sequence[int], start: int) -> bool:
    """Whether the keys for choosing are those of memory, in value, type and bytes."""
    (found, nbytes), (expected, expected_nbytes) = (source.probe_keys(layer, heads, start) for source in (disk, stored))
    return found.dtype == expected.dtype and torch.equal(found, expected) and nbytes == expected_nbytes


@st.composite
def _geometries(draw: st.DrawFn) -> KvGeometry:
    return KvGeometry(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([2, 8, 20])),
        page_size=draw(st.sampled_from([1, 16, 64, 96])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    )


@settings(max_examples=25)
@given(_geometries(), st.data())
def test_what_is_read_equals_what_was_stored(geometry: KvGeometry, data: st.DataObject) -> None:
    """Whatever the shape, and with slots and messages so small that most reads take several calls."""
    size = chunk_tokens(geometry.page_size)
    first = data.draw(st.integers(0, 2), label="first chunk")
    end = (first + data.draw(st.integers(1, 3), label="chunks")) * size
    pages = data.draw(st.integers(0, size // geometry.page_size - 1), label="pages before the start")
    start = first * size + pages * geometry.page_size
    codes = MOST_LAYERS * min(PROBE_HEADS, geometry.kv_heads) * code_bytes(geometry.head_dim)
    token_bytes = max(geometry.token_bytes // geometry.layers, codes)
    slot_bytes = -(-token_bytes * data.draw(st.integers(1, 40), label="tokens of a slot") // 64) * 64
    kv = made_kv(geometry, end)
    wire = SparseWire(
        kv, geometry, slot_bytes=slot_bytes, slots=data.draw(st.integers(1, 4), label="slots"), max_payload=2400
    )
    try:
        disk, stored = wire.prefix(first * size, start, end), wire.stored(start, end)
        layer = data.draw(st.integers(0, geometry.layers - 1), label="layer")
        heads = data.draw(st.sets(st.integers(0, geometry.kv_heads - 1), min_size=1).map(sorted), label="heads")
        low = data.draw(st.integers(start, end - 1), label="low")
        count = data.draw(st.integers(0, min(end - start, 50)), label="count")
        generator = torch.Generator().manual_seed(count)
        tokens = (torch.randperm(end - start, generator=generator)[:count] + start).sort().values
        by_head = torch.stack(
            [
                (torch.randperm(end - start, generator=generator)[:count] + start).sort().values
                for _ in range(geometry.kv_heads)
            ]
        )

        assert (disk.start, disk.end, disk.tokens) == (stored.start, stored.end, stored.tokens)
        assert (disk.kv_heads, disk.token_bytes) == (stored.kv_heads, stored.token_bytes)
        assert same_keys(disk, stored, layer, heads, low)
        assert torch.equal(disk.keys(layer, low), stored.keys(layer, low))
        assert torch.equal(disk.gather(layer, tokens), stored.gather(layer, tokens))
        assert torch.equal(disk.values_by_head(layer, by_head), stored.values_by_head(layer, by_head))
        assert wire.buffers.taken == 0
    finally:
        wire.close()


def test_calls_fit_in_slots_and_say_what_they_cost(wire: SparseWire) -> None:
    """Twenty tokens through slots of eight take three calls, with the chunks of each and the key of the tenant."""
    prefix = wire.prefix(64, 80, 256)
    tokens = torch.arange(100, 200, 5)

    prefix.gather(1, tokens)

    assert [len(call.tokens) // 4 for call in wire.reader.asked] == [8, 8, 4]
    assert [(call.depth, len(call.chunks) // 16) for call in wire.reader.asked] == [(64, 2), (128, 1), (128, 2)]
    assert {call.key_id for call in wire.reader.asked} == {"key"}
    assert prefix.disk_bytes == 20 * TOKEN_BYTES


def test_a_slot_waits_for_its_late_answer(make_wire: MakeWire) -> None:
    """Who asked has given up; until the storage says that it is done, nobody else reads into the slot."""
    wire = make_wire(made_kv(GEOMETRY, 64), slot_bytes=8 * TOKEN_BYTES, slots=1)
    tokens = torch.arange(4)
    wire.close_gate(1)
    impatient, patient = wire.prefix(0, 0, 64, timeout_s=0.0), wire.prefix(0, 0, 64)

    with pytest.raises(SparsePrefixLost, match="did not answer"):
        impatient.gather(1, tokens)
    with pytest.raises(SparsePrefixLost, match="in use"):
        impatient.gather(2, tokens)
    with ThreadPoolExecutor(1) as other:
        later = other.submit(patient.gather, 2, tokens)
        assert wire.buffers.taken == 1
        wire.open_gate(1)
        found = later.result(20)

    assert torch.equal(found, wire.stored(0, 64).gather(2, tokens))
    assert [call.layer for call in wire.reader.asked] == [1, 2]
    assert wire.buffers.taken == 0


def test_an_abandoned_read_leaves_no_slot_behind(wire: SparseWire) -> None:
    """Of two calls under way the first fails; the second one's slot comes back with its answer, too."""
    prefix = wire.prefix(0, 0, 256)
    wire.reader.error = NotFound("the disk lacks a copy")

    with pytest.raises(SparsePrefixLost, match=r"the disk lacks a copy \(not_found\)"):
        prefix.gather(0, torch.arange(16))
    wire.reader.error = None

    assert torch.equal(prefix.gather(0, torch.arange(30)), wire.stored(0, 256).gather(0, torch.arange(30)))
    assert wire.buffers.taken == 0


@pytest.mark.parametrize("error", [IntegrityError("torn"), ValueError("a bug")])
def test_an_error_of_the_storage_is_one_error_here(wire: SparseWire, error: Exception) -> None:
    """Whatever it was, the request runs again by another way; the next one is not concerned."""
    prefix = wire.prefix(0, 0, 256)
    wire.reader.error = error
    code = error.code if isinstance(error, ThermoclineError) else "internal_error"

    with pytest.raises(SparsePrefixLost, match=code):
        prefix.probe_keys(0, (0,), 0)
    wire.reader.error = None

    assert same_keys(prefix, wire.stored(0, 256), 0, (0,), 0)


def test_altered_bytes_are_not_used(wire: SparseWire, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the slot must be what the storage has read."""
    monkeypatch.setattr(sparse_calls, "xxhash", _OtherHash)

    with pytest.raises(SparsePrefixLost, match="altered"):
        wire.prefix(0, 0, 256).gather(0, torch.arange(4))

    assert wire.buffers.taken == 0


class _OtherHash:
    """A bit of what was read is not what arrives."""

    @staticmethod
    def xxh3_64_intdigest(data: memoryview) -> int:
        return xxhash.xxh3_64_intdigest(data) ^ 1


def test_a_worker_cut_off_from_the_bus_waits_for_nothing(wire: SparseWire) -> None:
    """Nothing was sent, so no slot is lost."""
    prefix = wire.prefix(0, 0, 256)
    wire.worker.disconnect()

    with pytest.raises(SparsePrefixLost, match="not connected"):
        prefix.gather(0, torch.arange(4))

    assert wire.buffers.taken == 0


def test_many_threads_share_few_slots(make_wire: MakeWire) -> None:
    """Reads of several calls from more threads than slots all end, and each has its own bytes."""
    wire = make_wire(made_kv(GEOMETRY, 256), slot_bytes=4 * TOKEN_BYTES, slots=2)
    prefix, stored = wire.prefix(0, 0, 256), wire.stored(0, 256)

    def read(number: int) -> bool:
        tokens = torch.arange(number, 256, 7)
        return torch.equal(prefix.gather(number % 3, tokens), stored.gather(number % 3, tokens))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(24)))
    assert wire.buffers.taken == 0


def test_keys_of_several_layers_come_by_one_read(wire: SparseWire) -> None:
    """They are read beside the computation, and the layers that want them read none themselves, also when repeated."""
    prefix, stored = wire.prefix(0, 0, 256), wire.stored(0, 256)
    assert prefix.prefetch_keys(1, 2, (0, 1), 64)
    assert wire.reader.began.wait(20)

    for layer in (1, 1, 2):
        assert same_keys(prefix, stored, layer, (0, 1), 64)
    assert {(call.layer, call.layers) for call in wire.reader.asked} == {(1, 2)}


def test_keys_of_several_layers_are_kept_until_the_last_of_them_has_asked(wire: SparseWire) -> None:
    """One read serves three layers; behind the last of them nothing is kept for the rest of the request."""
    prefix, stored = wire.prefix(0, 0, 256), wire.stored(0, 256)

    found = [prefix.probe_keys(layer, (0, 1), 64, 3)[0] for layer in (0, 1, 2)]
    once = {(call.layer, call.layers) for call in wire.reader.asked}
    wire.reader.asked.clear()
    again = prefix.probe_keys(2, (0, 1), 64)[0]

    for layer, keys in enumerate([*found[:2], again]):
        assert torch.equal(keys, stored.probe_keys(layer, (0, 1), 64)[0])
    assert once == {(0, 3)}
    assert {(call.layer, call.layers) for call in wire.reader.asked} == {(2, 1)}


def test_what_earlier_layers_did_not_use_is_forgotten(wire: SparseWire) -> None:
    """Two reads are kept for each request; a later layer makes room for more."""
    prefix, stored = wire.prefix(0, 0, 256), wire.stored(0, 256)
    assert prefix.prefetch_keys(0, 1, (0,), 0)
    assert prefix.prefetch_keys(1, 1, (0,), 0)
    assert not prefix.prefetch_keys(2, 1, (0,), 0)

    is_same = same_keys(prefix, stored, 1, (0,), 0)

    assert is_same
    assert prefix.prefetch_keys(2, 1, (0,), 0)


@pytest.mark.parametrize("asked", [(2, (0, 1), 64), (1, (1,), 64), (1, (0, 1), 65)])
def test_other_keys_than_those_read_ahead_are_read(wire: SparseWire, asked: tuple[int, tuple[int, ...], int]) -> None:
    """What was guessed wrongly is never served."""
    prefix, stored = wire.prefix(0, 0, 256), wire.stored(0, 256)
    layer, heads, start = asked
    prefix.prefetch_keys(1, 1, (0, 1), 64)

    assert same_keys(prefix, stored, layer, heads, start)


def test_demand_does_not_wait_for_what_is_read_ahead(make_wire: MakeWire) -> None:
    """KV is read beside prefetched keys, and keys whose read has not begun are read now."""
    wire = make_wire(made_kv(GEOMETRY, 64), slot_bytes=128 * TOKEN_BYTES, slots=4)
    reads = wire.reads()
    prefix, other = (DiskPrefix(sparse_prefix(GEOMETRY, 0, 0, 64), reads) for _ in range(2))
    stored = wire.stored(0, 64)
    held = threading.Event()
    blocked = reads.ahead(lambda: torch.tensor(held.wait(20)))
    prefix.prefetch_keys(1, 1, (0,), 0)

    kv = other.gather(0, torch.arange(8))
    is_same = same_keys(prefix, stored, 1, (0,), 0)
    held.set()

    assert blocked is not None
    assert torch.equal(kv, stored.gather(0, torch.arange(8)))
    assert is_same
    assert [(call.part, call.layer) for call in wire.reader.asked] == [("kv", 0), ("codes", 1)]


def test_a_read_that_waits_for_a_slot_does_not_hold_up_the_end(make_wire: MakeWire) -> None:
    """Slots of a silent storage are not given back; what waits for one ends when the worker does."""
    wire = make_wire(made_kv(GEOMETRY, 64), slot_bytes=64 * TOKEN_BYTES, slots=1)
    wire.buffers.take(20)
    reads, waits = wire.reads(timeout_s=600.0), threading.Event()
    prefix = DiskPrefix(sparse_prefix(GEOMETRY, 0, 0, 64), reads)

    def read() -> torch.Tensor:
        waits.set()
        return prefix.keys(0, 0)

    begun = reads.ahead(read)
    assert begun is not None
    assert waits.wait(20)

    wire.run(reads.close())

    with pytest.raises(SparsePrefixLost, match="the worker is stopping"):
        begun.result(0)


def test_an_error_of_keys_read_ahead_is_raised_where_they_are_wanted(wire: SparseWire) -> None:
    """Not before, and not again by whoever reads later."""
    prefix = wire.prefix(0, 0, 256)
    wire.reader.error = IntegrityError("torn")
    prefix.prefetch_keys(1, 1, (0,), 0)

    with pytest.raises(SparsePrefixLost, match="integrity_error"):
        prefix.probe_keys(1, (0,), 0)
    wire.reader.error = None

    assert same_keys(prefix, wire.stored(0, 256), 1, (0,), 0)


def test_reading_ahead_is_bounded(wire: SparseWire) -> None:
    """Beyond that nothing is begun, and keys are read when they are wanted."""
    reads, held = wire.reads(), threading.Event()
    begun = [reads.ahead(lambda: torch.tensor(held.wait(20))) for _ in range(9)]
    held.set()

    assert [one is None for one in begun] == [False] * 8 + [True]


def test_stopping_fails_what_is_under_way(make_wire: MakeWire) -> None:
    """The compute thread goes on at once, and nothing is left in /dev/shm."""
    wire = make_wire(made_kv(GEOMETRY, 64), slot_bytes=8 * TOKEN_BYTES, slots=2)
    wire.close_gate(0)
    reads = wire.reads()
    prefix = DiskPrefix(sparse_prefix(GEOMETRY, 0, 0, 64), reads)
    with ThreadPoolExecutor(1) as compute:
        reading = compute.submit(prefix.gather, 0, torch.arange(4))
        assert wire.reader.began.wait(20)
        wire.run(reads.close())

        with pytest.raises(SparsePrefixLost, match="stopping"):
            reading.result(20)
    with pytest.raises(SparsePrefixLost):
        prefix.gather(0, torch.arange(4))

    assert [name for name in SHM_DIRECTORY.iterdir() if name.name.startswith(wire.prefix_of_names)] == []


@pytest.mark.parametrize(
    ("depth", "start", "end"),
    [(0, 0, 65), (64, 0, 128), (0, 64, 64)],
)
def test_chunks_that_do_not_hold_the_prefix_are_refused(wire: SparseWire, depth: int, start: int, end: int) -> None:
    """Before anything is read by them."""
    with pytest.raises(InvalidRequest, match="do not hold"):
        wire.prefix(depth, start, end)


def test_a_slot_must_hold_a_token(make_wire: MakeWire) -> None:
    """Said when the worker starts, with the figures; so are buffers without room for slots."""
    wire = make_wire(made_kv(GEOMETRY, 64), slot_bytes=64, slots=2)

    with pytest.raises(ConfigError, match="sparse-buffer-bytes"):
        wire.reads()
    # K and V of a token have 48 bytes, and its codes in four layers 96: cutting them into calls would never end.
    few = KvGeometry(layers=4, kv_heads=3, head_dim=2, page_size=16, dtype="float32")
    with pytest.raises(ConfigError, match="sparse-buffer-bytes"):
        make_wire(made_kv(few, 64), few, slot_bytes=64, slots=2).reads()
    with pytest.raises(ConfigError, match="slots"):
        ReadBuffers("unused", 100)
