"""Write policies: what goes to host memory and to disk when it is computed, when it is reused, and when it leaves."""

from typing import Any

import pytest

from services.scheduler.core import check_invariants
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import drop_device, give_host, lock_host, unlock_host
from services.scheduler.core.step import Step
from services.scheduler.core.tiers.host_admission import take_host_pages
from services.scheduler.core.tiers.making_room import make_room
from services.scheduler.core.tiers.writes import PAGES_AHEAD
from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.storage_plans import BackupPages, SaveChunks
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import (
    MakeCell,
    host_pool,
    nodes_of,
    orders,
    orders_of,
    worker_goes_on,
    worker_runs,
)

DOCUMENT = list(range(200))


@pytest.fixture
def make_tiers(make_cell: MakeCell) -> MakeCell:
    """A cell whose chunks are of four pages, with a disk."""

    def make(**options: Any) -> CellModel:
        return make_cell(**{"page_size": 16, "pages": 32, "host_pages": 32, "disk_chunks": 50} | options)

    return make


def run(cell: CellModel, *prompts: list[int], **request: Any) -> None:
    """Let these prompts be answered, one after another."""
    for prompt in prompts:
        cell.serve(prompt, max_tokens=1, **request)


# Disk.


def test_through_saves_a_prompt_once_it_is_computed(make_tiers: MakeCell) -> None:
    """Not at its chunks' ends, nor at decode steps, but before the request is over."""
    cell = make_tiers(max_batch_tokens=64)
    cell.submit(DOCUMENT, max_tokens=20, ignore_eos=True)
    worker = cell.workers["worker-0"]
    for _ in range(3):
        worker.step()
        cell.deliver(worker)
    assert orders_of(cell, SaveChunks) == []

    worker.step()
    cell.deliver(worker)

    (order,) = orders_of(cell, SaveChunks)
    assert len(order.tokens) == 192 * 4
    assert cell.state.requests


def test_through_saves_an_answer_when_it_ends(make_tiers: MakeCell) -> None:
    """What decoding added follows in one order."""
    cell = make_tiers()
    cell.serve(DOCUMENT, max_tokens=80, ignore_eos=True)

    assert [(order.depth, len(order.tokens) // 4) for order in orders_of(cell, SaveChunks)] == [(0, 192), (192, 64)]


def test_what_is_on_the_disk_is_not_saved_again(make_tiers: MakeCell) -> None:
    """A repeated prompt costs nothing; once its chunk was dropped there, it is saved anew."""
    cell = make_tiers()
    run(cell, DOCUMENT, DOCUMENT)
    assert len(orders_of(cell, SaveChunks)) == 1

    chunks = cell.state.storages["storage"].disk.chunks
    del chunks[list(chunks)[1]]
    run(cell, DOCUMENT)

    assert [(order.depth, len(order.tokens) // 4) for order in orders_of(cell, SaveChunks)[1:]] == [(64, 64)]


@pytest.mark.parametrize("options", [{"disk_writes": "off"}, {"disk_chunks": 0}, {"host_tier": False}])
def test_nothing_is_saved_where_there_is_nothing_to_save_to(
    make_tiers: MakeCell, options: dict[str, str | int]
) -> None:
    """It is off, or there is no disk, or no host memory beside it."""
    cell = make_tiers(**options)
    run(cell, DOCUMENT)

    assert orders_of(cell, SaveChunks) == []


def test_a_request_that_must_not_write_is_not_saved(make_tiers: MakeCell) -> None:
    """Its tokens leave no trace on disk."""
    cell = make_tiers()
    run(cell, DOCUMENT, write=False)

    assert orders_of(cell, SaveChunks) == []


def test_selective_saves_what_was_reused(make_tiers: MakeCell) -> None:
    """The shared document goes to disk with its second use, what only one request had does not."""
    cell = make_tiers(disk_writes="selective", admission_frequency=2)
    run(cell, DOCUMENT[:128] + [1] * 70)
    assert orders_of(cell, SaveChunks) == []
    run(cell, DOCUMENT[:128] + [2] * 70)

    (order,) = orders_of(cell, SaveChunks)
    assert unpack_int32(order.tokens) == DOCUMENT[:128]


def test_selective_saves_a_hot_prefix_that_the_disk_lost(make_tiers: MakeCell) -> None:
    """Being hot already, it goes to disk again at its next use."""
    cell = make_tiers(disk_writes="selective", admission_frequency=2)
    run(cell, DOCUMENT[:128] + [1] * 70, DOCUMENT[:128] + [2] * 70)
    cell.state.storages["storage"].disk.chunks.clear()
    run(cell, DOCUMENT[:128] + [3] * 70)

    assert len(orders_of(cell, SaveChunks)) == 2


# Leaving host memory.


def test_on_evict_saves_what_leaves_host_memory(make_tiers: MakeCell) -> None:
    """Nothing is saved before; then the chunks are read before their pages are filled anew."""
    cell = make_tiers(pages=14, host_pages=14, disk_writes="on_evict")
    run(cell, DOCUMENT, [7] * 200)
    assert orders_of(cell, SaveChunks) == []

    cell.submit([8] * 200, max_tokens=1)

    plans = [order for order in orders(cell.outputs[-1], object) if isinstance(order, SaveChunks | BackupPages)]
    assert [type(plan) for plan in plans] == [SaveChunks, BackupPages]
    save, backup = plans
    assert isinstance(save, SaveChunks)
    assert unpack_int32(save.tokens) == DOCUMENT[:192]
    assert set(unpack_int32(save.host_pages)) & set(unpack_int32(backup.host_pages))
    assert save.worker_id == ""
    cell.drain()


def test_on_evict_does_not_save_what_is_on_the_disk(make_tiers: MakeCell) -> None:
    """A copy that was brought up from there goes without a word."""
    cell = make_tiers(pages=14, host_pages=14, disk_writes="on_evict")
    run(cell, DOCUMENT, [7] * 200, [8] * 200)
    saved = len(orders_of(cell, SaveChunks))
    run(cell, DOCUMENT, [9] * 200)
    first = orders_of(cell, SaveChunks)[0]

    again = [order for order in orders_of(cell, SaveChunks)[saved:] if order.identities == first.identities]
    assert again == []


@pytest.fixture
def straddling(make_tiers: MakeCell) -> tuple[CellModel, Node, Node]:
    """A node of 14 pages on the device alone, and its child of 10 pages in host memory alone."""
    cell = make_tiers(disk_writes="on_evict", policy="lru", host_pages=20)
    run(cell, list(range(224)), list(range(384)))
    state = cell.state
    upper, lower = nodes_of(cell, list(range(384)))
    storage = state.storages["storage"]
    assert storage.pool is not None
    give_host(state, lower, storage, present(storage.pool.allocate(10)))
    for index, page in enumerate(unpack_int32(lower.host_pages("storage"))):
        number = unpack_int32(lower.device_pages("worker-0"))[index]
        assert cell.storages["storage"].pool is not None
        cell.storages["storage"].pool.memory[page] = cell.workers["worker-0"].memory[number]
    drop_device(state, lower, state.workers["worker-0"])
    return cell, upper, lower


def test_a_chunk_that_begins_above_a_leaving_copy_is_read_from_both(straddling: tuple[CellModel, Node, Node]) -> None:
    """The pages above come from the device, which keeps them until the storage has read them."""
    cell, upper, lower = straddling
    turn = Step(cell.state, cell.seq, cell.time_ns)
    copies = unpack_int32(lower.host_pages("storage"))

    taken = take_host_pages(turn, cell.state.storages["storage"], 20)

    assert taken is not None
    (order,) = orders(turn.outputs, SaveChunks)
    assert (order.depth, unpack_int32(order.tokens)) == (192, list(range(192, 384)))
    assert unpack_int32(order.host_pages) == [-1, -1, *copies]
    assert unpack_int32(order.device_pages) == unpack_int32(upper.device_pages("worker-0"))[12:] + [-1] * 10
    assert upper.locks == {"worker-0": 1}


def test_a_victim_that_a_save_begins_to_read_stays(straddling: tuple[CellModel, Node, Node]) -> None:
    """To make room for its copy another copy is dropped, whose first chunk begins in it, and yet it gets no room."""
    cell, upper, lower = straddling
    state, turn = cell.state, Step(cell.state, cell.seq, cell.time_ns)
    storage, worker = state.storages["storage"], state.workers["worker-0"]
    cell.submit([7] * 130, max_tokens=1)
    worker_runs(cell)
    (other,) = nodes_of(cell, [7] * 128)
    assert storage.pool is not None
    give_host(state, other, storage, present(storage.pool.allocate(8)))
    lock_host(other, "storage")

    is_free = make_room(turn, worker, worker.pool.free + 14)

    unlock_host(state, other, storage)
    assert not is_free
    assert len(orders(turn.outputs, SaveChunks)) == 1
    assert lower.id not in state.tree.nodes
    assert len(upper.device_pages("worker-0")) == 14 * 4
    check_invariants(state)


# Host memory.


def test_what_is_saved_is_what_was_computed_though_its_copy_makes_room_by_a_cut(make_tiers: MakeCell) -> None:
    """To copy the end of a sequence, the copy of its start leaves in part, which cuts a node that is to be saved."""
    cell = make_tiers(host_pages=20, host_writes="through")
    start = list(range(320))
    sequence = start + list(range(1000, 1064))
    run(cell, start)
    (node,) = nodes_of(cell, start)
    assert len(node.host_pages("storage")) == 20 * 4
    cell.state.storages["storage"].disk.chunks.clear()
    saved = len(orders_of(cell, SaveChunks))

    run(cell, sequence)

    assert len(nodes_of(cell, sequence)) > 2
    saves = orders_of(cell, SaveChunks)[saved:]
    assert b"".join(order.tokens for order in saves) == pack_int32(sequence)
    chain = chain_pages(chain_root(namespace()), pack_int32(sequence), 16 * 4)
    assert b"".join(order.identities for order in saves) == chain


def test_through_copies_a_prompt_and_leaves_it_on_the_device(make_tiers: MakeCell) -> None:
    """The copy is made once the prompt is computed; the next request still finds it on the device."""
    cell = make_tiers(host_writes="through")
    run(cell, DOCUMENT)
    (node,) = nodes_of(cell, DOCUMENT)
    run(cell, DOCUMENT)

    assert len(node.host_pages("storage")) == len(node.device_pages("worker-0")) == 12 * 4
    assert len(orders_of(cell, BackupPages)) == 1
    assert cell.admitted[-1].device_tokens == 192
    assert cell.state.counters.get("evicted_pages_device", 0) == 0


def test_a_copied_node_leaves_the_device_at_once(make_tiers: MakeCell) -> None:
    """That is what the copy was made for: nobody waits for a backup."""
    cell = make_tiers(pages=14, host_writes="through")
    run(cell, DOCUMENT)

    cell.submit([7] * 200, max_tokens=1, request_id="next")

    assert cell.admitted[-1].request_id == "next"
    assert cell.state.workers["worker-0"].moves.leaving == 0


def test_a_node_that_is_being_copied_does_not_count_as_leaving(make_tiers: MakeCell) -> None:
    """Its pages are not free after the copy; who needs them waits, and then evicts it."""
    cell = make_tiers(pages=14, host_writes="through", disk_writes="off")
    cell.submit(DOCUMENT, max_tokens=1)
    worker_goes_on(cell)
    assert cell.state.transfers
    cell.submit([7] * 200, max_tokens=1, request_id="next")

    assert cell.state.workers["worker-0"].moves.leaving == 0
    assert cell.admitted[-1].request_id != "next"
    cell.drain()
    assert cell.admitted[-1].request_id == "next"
    assert cell.state.counters["evicted_pages_device"] == 12


def test_selective_copies_what_was_reused(make_tiers: MakeCell) -> None:
    """The shared part has a copy after its second use; what only one request had has none."""
    cell = make_tiers(host_writes="selective", admission_frequency=2)
    run(cell, DOCUMENT[:128] + [1] * 70)
    assert orders_of(cell, BackupPages) == []
    run(cell, DOCUMENT[:128] + [2] * 70)

    shared, alone = nodes_of(cell, DOCUMENT[:128] + [2] * 70)
    assert "storage" in shared.host
    assert "storage" not in alone.host


def test_copies_ahead_of_eviction_are_bounded(make_tiers: MakeCell) -> None:
    """Backups that free pages do not wait behind any number of them; what is left is copied when it is evicted."""
    cell = make_tiers(page_size=1, pages=4000, host_pages=4000, host_writes="through", disk_writes="off")
    for first in (1, 2, 3):
        cell.submit([first] * (PAGES_AHEAD // 2 + 1), max_tokens=1)
        worker_runs(cell)

    assert len(orders_of(cell, BackupPages)) == 1
    assert cell.state.counters["copied_ahead_pages"] == PAGES_AHEAD // 2 + 1


def test_admission_decides_on_copies_ahead_of_eviction(make_tiers: MakeCell) -> None:
    """What is not worth a copy at its eviction is not worth one before."""
    cell = make_tiers(host_writes="through", admission="none")
    run(cell, DOCUMENT)

    assert orders_of(cell, BackupPages) == []


def test_a_copy_that_failed_leaves_the_device_as_it_was(make_tiers: MakeCell) -> None:
    """The node is made a copy of when it is evicted, as any other."""
    cell = make_tiers(host_writes="through", disk_writes="off")
    cell.submit(DOCUMENT, max_tokens=1)
    worker_goes_on(cell)
    cell.storages["storage"].step(backups_succeed=False)
    cell.drain()

    (node,) = nodes_of(cell, DOCUMENT)
    assert node.host == ()
    assert len(node.device_pages("worker-0")) == 12 * 4
    assert host_pool(cell).leased == 0
