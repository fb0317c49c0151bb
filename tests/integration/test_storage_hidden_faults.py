"""What a storage makes of damaged, overwritten and impossible hidden states."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.backends.disk import DiskBackend
from services.storage.media import Media
from services.storage.page_gate import PageGate
from shared.chunks import geometry_id
from shared.messages.base import pack_int32
from shared.messages.pools import HIDDEN, KvGeometry
from shared.messages.status import VerifyChunks
from shared.messages.storage_events import ChunksDropped, ChunksFetched, ChunksSaved, HostPoolCreated
from shared.messages.storage_plans import CancelFetch, CreateHostPool, DropChunks, PinChunks
from tests.cases import case
from tests.integration.storage_cell import (
    GEOMETRY,
    NAMESPACE,
    TIMEOUT_S,
    Sequence,
    StorageCell,
    flip_byte,
    gated_memory,
    running_storage,
)
from tests.integration.storage_hidden_cell import HIDDEN_GEOMETRY, make_hidden_pool, running_with_hidden, told

pytestmark = pytest.mark.integration


def _file(directory: Path, name: bytes, geometry: KvGeometry) -> Path:
    path = directory / "chunks" / ChunkKey(NAMESPACE, geometry_id(geometry), name).path
    return path.with_name(f"{path.name}.chunk")


async def test_damaged_hidden_states_are_quarantined_and_nothing_behind_them_is_served(
    prefix: str, tmp_path: Path
) -> None:
    """A fetch ends before it and names it; KV of the same tokens is as good as before, and the hidden states are
    saved anew.
    """
    sequence = Sequence.make(1, 3)
    pages = list(range(12))
    async with running_with_hidden(prefix, Media(DiskBackend([str(tmp_path)]))) as state:
        cell = state.cell
        written = state.write(sequence, pages)
        await cell.save(sequence, host=pages, form=HIDDEN)
        await cell.save(sequence, device=pages)
        flip_byte(_file(tmp_path, sequence.names[1], HIDDEN_GEOMETRY), BLOCK_BYTES + 100)
        bad = await cell.fetch(sequence, list(range(20, 32)), form=HIDDEN)
        counters = (await cell.inventory()).counters
        of_kv = await cell.fetch(sequence, pages)
        again = await cell.save(sequence, host=pages, form=HIDDEN)
        good = await cell.fetch(sequence, list(range(20, 32)), form=HIDDEN)

        assert (bad.chunks, bad.missing) == (1, sequence.names[1])
        assert "wrong checksum" in bad.error
        assert counters["quarantined_wrong_checksum"] == 1
        assert (of_kv.chunks, again.chunks, good.chunks) == (3, b"".join(sequence.names), 3)
        assert state.holds(sequence, list(range(20, 32)), written)


async def test_kv_under_the_name_of_hidden_states_is_found_out(prefix: str, tmp_path: Path) -> None:
    """A file of one form in the place of the other is not served, whichever way round."""
    sequence = Sequence.make(1, 1)
    pages = list(range(4))
    async with running_with_hidden(prefix, Media(DiskBackend([str(tmp_path)]))) as state:
        state.write(sequence, pages)
        await state.cell.save(sequence, host=pages, form=HIDDEN)
        await state.cell.save(sequence, device=pages)
        files = [_file(tmp_path, sequence.names[0], geometry) for geometry in (HIDDEN_GEOMETRY, GEOMETRY)]
        blobs = [file.read_bytes() for file in files]
        for file, blob in zip(files, reversed(blobs), strict=True):
            file.write_bytes(blob)
        fetched = [await state.cell.fetch(sequence, pages, form=form) for form in (HIDDEN, "kv")]

    assert [(answer.chunks, answer.missing) for answer in fetched] == [(0, sequence.names[0])] * 2


async def test_verifying_walks_both_forms(prefix: str, tmp_path: Path) -> None:
    """A scrub in pieces meets every chunk once, and reports a bad one under its form."""
    sequence = Sequence.make(1, 3)
    pages = list(range(12))
    async with running_with_hidden(prefix, Media(DiskBackend([str(tmp_path)]))) as state:
        cell = state.cell
        state.write(sequence, pages)
        await cell.save(sequence, host=pages, form=HIDDEN)
        await cell.save(sequence, device=pages)
        flip_byte(_file(tmp_path, sequence.names[2], HIDDEN_GEOMETRY), BLOCK_BYTES + 17)
        answers = [await cell.verify(VerifyChunks(max_chunks=2))]
        while answers[-1].next_after:
            answers.append(await cell.verify(VerifyChunks(after=answers[-1].next_after, max_chunks=2)))
        dropped = await told(cell, ChunksDropped, 1)
        counters = (await cell.inventory()).counters

    assert sum(answer.checked for answer in answers) == 6
    assert len(answers) >= 3
    (bad,) = [line for answer in answers for line in answer.bad]
    assert bad.startswith(sequence.names[2].hex())
    assert "wrong checksum" in bad
    assert counters["disk_chunks"] == 5
    assert dropped == {"kv": [], HIDDEN: [sequence.names[2]]}


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed as another's", "not sealed"])
async def test_a_page_that_a_frozen_worker_overwrote_is_never_written_down(prefix: str, is_sealed: bool) -> None:
    """Identity and checksums are those of what was read, so its chunk is left out and the others are saved."""
    sequence, stale = Sequence.make(1, 2), Sequence.make(2, 1)
    disk = gated_memory()
    async with running_with_hidden(prefix, Media(disk)) as state:
        state.write(sequence, list(range(8)))
        if is_sealed:
            state.write(stale, [1])
        else:
            state.pool.pages[1, 0, 5] ^= 1
        saved = await state.cell.save(sequence, host=list(range(8)), form=HIDDEN)
        fetched = await state.cell.fetch(sequence, list(range(8)), form=HIDDEN)

    assert saved.chunks == sequence.names[1]
    assert ("replaced" if is_sealed else "damaged") in saved.error
    assert (disk.puts, fetched.chunks, fetched.missing) == (1, 0, sequence.names[0])


async def test_hidden_pages_are_read_before_a_later_order_writes_them(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch to pages that a save has still to read waits for it, and one to host pages of those numbers does not."""
    assert PageGate.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(PageGate.__init__.__kwdefaults__, "wait_s", 2 * TIMEOUT_S)
    first, second = Sequence.make(1, 4), Sequence.make(2, 1)
    pages = list(range(16))
    disk = gated_memory()
    async with running_with_hidden(prefix, Media(disk), io_threads=2) as state:
        cell = state.cell
        other = state.write(second, pages[:4], seed=1)
        await cell.save(second, host=pages[:4], form=HIDDEN)
        await cell.save(second, device=pages[:4])
        written = state.write(first, pages)
        disk.put_gate.clear()
        disk.put_entered.clear()
        order = cell.save_order(first, host=pages, form=HIDDEN)
        await cell.order(order)
        fetch = cell.fetch_order(second, pages[12:], form=HIDDEN)
        await cell.order(fetch)
        beside = await cell.fetch(second, pages[12:])
        kept = state.holds(first, pages[12:], written[12:], first=12)
        disk.put_gate.set()
        saved = await cell.event(ChunksSaved)
        fetched = await cell.fetched(fetch.fetch_id)

        assert (beside.chunks, kept) == (1, True)
        assert (saved.chunks, saved.error) == (b"".join(first.names), "")
        assert fetched.chunks == 1
        assert state.holds(second, pages[12:], other)


BAD_SAVES: list[tuple[dict[str, Any], str]] = [
    ({"host_pages": pack_int32([0, 1, -1, 3])}, "hidden pool alone"),
    ({"host_pages": pack_int32([0, 1, -1, 3]), "device_pages": pack_int32([-1, -1, 2, -1])}, "device pages"),
    ({"device_pages": pack_int32([0] * 4), "worker_id": "w0", "worker_incarnation": "i0"}, "device pages"),
    ({"host_pages": pack_int32([0, 1, 2, 48])}, "48 of the pool"),
    ({"form": "kv"}, "were replaced"),
]


async def test_a_bad_save_of_hidden_states_is_answered(prefix: str) -> None:
    """A device page, a page that there is not, or one of the other pool: the answer says what is wrong."""
    sequence = Sequence.make(1, 1)
    disk = gated_memory()
    async with running_with_hidden(prefix, Media(disk)) as state:
        state.write(sequence, [0, 1, 2, 3])
        for change, reason in BAD_SAVES:
            with case(reason=reason):
                saved = await state.cell.save(sequence, host=[0, 1, 2, 3], **({"form": HIDDEN} | change))

                assert (saved.chunks, disk.puts) == (b"", 0)
                assert reason in saved.error


async def test_orders_before_the_hidden_pool_are_answered(prefix: str) -> None:
    """Until there is one, hidden states are neither saved nor fetched, and KV is."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(gated_memory())) as cell:
        saved = await cell.save(sequence, host=[0, 1, 2, 3], form=HIDDEN)
        fetched = await cell.fetch(sequence, [0, 1, 2, 3], form=HIDDEN)
        of_kv = await cell.save(sequence, device=[0, 1, 2, 3])
        events = [event for event in cell.seen if isinstance(event, ChunksFetched)]

    assert "no hidden pool" in saved.error
    assert (fetched.chunks, fetched.is_over, len(events)) == (0, True, 1)
    assert "no hidden pool" in fetched.error
    assert of_kv.chunks == sequence.names[0]


OTHER_SHAPE = {"kv_heads": 1, "page_size": 64, "hidden": 0}


@pytest.mark.parametrize(
    ("budget", "reasons"),
    [
        (2**20, {"kv_heads": "not restored from", "page_size": "not restored from", "hidden": "do not add up"}),
        (0, {"": "--hidden-bytes is 0"}),
        (64, {"": "raise --hidden-bytes"}),
    ],
)
async def test_a_hidden_pool_that_cannot_be_is_answered(prefix: str, budget: int, reasons: dict[str, str]) -> None:
    """Another model's hidden states, layers that do not add up, no budget: each is said, and KV goes on."""
    sequence = Sequence.make(1, 1)
    async with running_storage(prefix, Media(gated_memory()), hidden_bytes=budget) as cell:
        for changed, reason in reasons.items():
            other = {changed: OTHER_SHAPE[changed]} if changed else {}
            await cell.order(CreateHostPool(geometry=msgspec.structs.replace(HIDDEN_GEOMETRY, **other)))
            created = await cell.event(HostPoolCreated)

            assert (created.handle, created.form) == (None, HIDDEN)
            assert reason in created.error
        saved = await cell.save(sequence, device=[0, 1, 2, 3])

        assert cell.joined is not None
        assert cell.joined.hidden_bytes == budget
    assert saved.chunks == sequence.names[0]


async def test_without_anything_below_there_is_no_room_for_hidden_states(prefix: str) -> None:
    """A storage that can keep no hidden states says so when it joins."""
    async with running_storage(prefix, Media(), hidden_bytes=2**20) as cell:
        assert cell.joined is not None
        assert cell.joined.hidden_bytes == 0


async def test_a_pin_holds_for_hidden_states_whose_pool_comes_later(prefix: str, tmp_path: Path) -> None:
    """What was pinned before there was a hidden pool is pinned in both forms."""
    sequence = Sequence.make(1, 1)
    media = Media(DiskBackend([str(tmp_path)]))
    async with running_storage(prefix, media, hidden_bytes=2**20) as cell:
        await cell.order(PinChunks(chunks=sequence.names[0]))
        await make_hidden_pool(cell)
        pinned = (await cell.inventory()).counters["disk_pinned"]
        await cell.order(PinChunks(chunks=sequence.names[0], is_pinned=False))
        saved = await cell.save(sequence, device=[0, 1, 2, 3])
        left = (await cell.inventory()).counters["disk_pinned"]

    assert (pinned, left) == (2, 0)
    assert saved.chunks == sequence.names[0]


async def test_a_cancelled_fetch_of_hidden_states_writes_nothing_more(prefix: str) -> None:
    """It is answered with how far it came, while fetches of KV go on."""
    sequence = Sequence.make(1, 2)
    pages = list(range(8))
    disk = gated_memory()
    async with running_with_hidden(prefix, Media(disk)) as state:
        state.write(sequence, pages)
        await state.cell.save(sequence, host=pages, form=HIDDEN)
        await state.cell.save(sequence, device=pages)
        state.wipe()
        disk.get_gate.clear()
        order, of_kv = (state.cell.fetch_order(sequence, pages, form=form) for form in (HIDDEN, "kv"))
        await state.cell.order(order)
        await asyncio.to_thread(disk.get_entered.wait, TIMEOUT_S)
        await state.cell.order(of_kv)
        await state.cell.order(CancelFetch(fetch_id=order.fetch_id))
        await _ordered(state.cell)
        disk.get_gate.set()
        answers = [await state.cell.event(ChunksFetched)]
        while not {order.fetch_id, of_kv.fetch_id} <= {answer.fetch_id for answer in answers if answer.is_over}:
            answers.append(await state.cell.event(ChunksFetched))
        ended = {answer.fetch_id: answer for answer in answers if answer.is_over}

        assert (ended[order.fetch_id].chunks, ended[order.fetch_id].error) == (0, "cancelled")
        assert ended[of_kv.fetch_id].chunks == 2
        assert not state.pool.pages.any()


async def test_hidden_states_on_their_way_do_not_come_back_after_a_drop(prefix: str) -> None:
    """What was ordered before the drop is given up, whichever form it is of."""
    sequence = Sequence.make(1, 3)
    pages = list(range(12))
    disk = gated_memory()
    async with running_with_hidden(prefix, Media(disk), io_threads=2) as state:
        state.write(sequence, pages)
        disk.put_gate.clear()
        await state.cell.order(state.cell.save_order(sequence, host=pages, form=HIDDEN))
        await asyncio.to_thread(disk.put_entered.wait, TIMEOUT_S)
        await state.cell.order(DropChunks(namespace=NAMESPACE))
        await _ordered(state.cell)
        disk.put_gate.set()
        saved = await state.cell.event(ChunksSaved)
        fetched = await state.cell.fetch(sequence, pages, form=HIDDEN)

    assert (saved.chunks, saved.error) == (b"", "its namespace was dropped")
    assert (fetched.chunks, list(disk.entries())) == (0, [])


async def _ordered(cell: StorageCell) -> None:
    """Return when every order so far was begun: orders take effect one after the other."""
    await cell.order(CreateHostPool(geometry=GEOMETRY))
    await cell.event(HostPoolCreated)
