"""Saves to the tiers below host memory: what one asks for, and how it ends."""

from typing import Any

import pytest

from services.scheduler.core.step import Output, Step
from services.scheduler.core.tiers import saves
from services.scheduler.core.tiers.save_runs import path_to
from services.scheduler.core.tiers.saves import save_path
from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.cell_events import FlushCache
from shared.messages.storage_events import ChunksSaved
from shared.messages.storage_plans import SaveChunks
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, set_heat, worker_runs

DOCUMENT = list(range(200))


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """Pages of 16 tokens, so that a chunk is four of them, and a disk with room."""
    return make_cell(page_size=16, pages=32, host_pages=32, disk_chunks=50)


def answer(cell: CellModel, order: SaveChunks, **fields: Any) -> list[Output]:
    """The storage answers a save with these fields."""
    storage = cell.storages["storage"]
    message = ChunksSaved(storage_id="storage", incarnation=storage.incarnation, save_id=order.save_id, **fields)
    return cell.feed(message)


def compute(cell: CellModel, tokens: list[int] = DOCUMENT, **request: Any) -> None:
    """Let a prompt be computed and answered, without the storage carrying anything out."""
    cell.submit(tokens, max_tokens=1, **request)
    worker_runs(cell)


def test_an_order_names_whole_chunks_and_where_their_pages_are(cell: CellModel) -> None:
    """Tokens and identities are of the chunks alone; the tail that fills no chunk stays out."""
    compute(cell)

    (order,) = orders_of(cell, SaveChunks)
    root = chain_root(namespace())
    assert (order.namespace, order.depth, order.parent) == (namespace(), 0, root)
    assert unpack_int32(order.tokens) == DOCUMENT[:192]
    assert order.identities == chain_pages(root, pack_int32(DOCUMENT[:192]), 64)
    assert order.device_pages == cell.admitted[0].pages[: 12 * 4]
    assert unpack_int32(order.host_pages) == [-1] * 12
    assert (order.worker_id, order.worker_incarnation) == ("worker-0", cell.workers["worker-0"].incarnation)


def test_what_follows_is_a_run_of_its_own(cell: CellModel) -> None:
    """A sequence that goes on is saved from the first chunk that is not on the disk yet, below its parent."""
    compute(cell)
    cell.drain()
    compute(cell, DOCUMENT + list(range(500, 600)))

    order = orders_of(cell, SaveChunks)[-1]
    assert order.depth == 192
    assert unpack_int32(order.tokens) == DOCUMENT[192:] + list(range(500, 556))
    assert order.parent == chain_pages(chain_root(namespace()), pack_int32(DOCUMENT[:192]), 64)[-16:]


def test_a_device_page_stays_until_the_answer(make_cell: MakeCell) -> None:
    """What the storage may still read is evicted for nobody; then it is."""
    cell = make_cell(page_size=16, pages=14, host_pages=32, disk_chunks=50, admission="none")
    compute(cell)
    cell.submit([7] * 200, max_tokens=1, request_id="next")

    assert cell.state.workers["worker-0"].pool.locked > 0
    assert cell.admitted[-1].request_id != "next"
    cell.drain()
    assert cell.admitted[-1].request_id == "next"
    assert cell.state.workers["worker-0"].pool.locked == 0


def test_the_answer_is_what_the_disk_is_believed_to_hold(cell: CellModel) -> None:
    """Chunks that were written join the catalogue and those that had to go leave it; nothing is on its way any more."""
    compute(cell)
    (order,) = orders_of(cell, SaveChunks)
    names = [order.identities[start : start + 16] for start in (48, 112, 176)]
    assert list(cell.state.storages["storage"].disk.saving) == names

    answer(cell, order, chunks=names[0] + names[1], dropped=names[1])

    storage = cell.state.storages["storage"]
    assert (storage.disk.saving, cell.state.saves, cell.timers) == ({}, {}, {})
    assert list(storage.disk.chunks) == [names[0], names[1]]
    assert list(storage.disk.taken) == [names[2]]
    assert cell.state.counters["saves_done"] == 1
    assert cell.state.counters["saved_chunks"] == 2


def test_what_the_storage_took_elsewhere_is_not_offered_again(make_cell: MakeCell) -> None:
    """A storage without a disk names no chunk; its object store has them, until it is flushed."""
    cell = make_cell(page_size=16, pages=32, host_pages=32, has_remote=True)
    for _ in range(2):
        compute(cell)
        cell.drain()
    assert len(orders_of(cell, SaveChunks)) == 1

    cell.feed(FlushCache(call_id="flush", tiers=("remote",)))
    compute(cell)

    assert len(orders_of(cell, SaveChunks)) == 2


def test_what_came_from_the_object_store_is_not_offered_back_to_it(make_cell: MakeCell) -> None:
    """A storage without a disk that begins anew learns of its chunks by fetching them."""
    cell = make_cell(page_size=16, pages=32, host_pages=32, has_remote=True)
    compute(cell)
    cell.drain()
    cell.lose_storage("storage")
    cell.lose_worker("worker-0")
    cell.add_storage("storage", pages=32, has_remote=True)
    cell.add_worker("worker-0", pages=32)
    cell.drain()
    cell.serve(DOCUMENT, max_tokens=1)

    assert cell.admitted[-1].remote_tokens == 192
    assert len(orders_of(cell, SaveChunks)) == 1
    assert len(cell.state.storages["storage"].disk.taken) == 3


def test_a_save_that_failed_is_tried_again_at_the_next_use(cell: CellModel) -> None:
    """An error says nothing of the chunks."""
    compute(cell)
    answer(cell, orders_of(cell, SaveChunks)[0], error="the disk is full")
    compute(cell)

    first, second = orders_of(cell, SaveChunks)
    assert second.identities == first.identities
    assert cell.state.counters["saves_failed"] == 1


def test_a_late_save_keeps_its_pages_and_stops_others(cell: CellModel) -> None:
    """Past its deadline it counts as failed; the storage may still read, and gets no more to do until it answers."""
    compute(cell)
    (order,) = orders_of(cell, SaveChunks)
    cell.fire(f"save.{order.save_id}")

    assert cell.state.workers["worker-0"].pool.locked == 12
    compute(cell, [8] * 200)
    assert len(orders_of(cell, SaveChunks)) == 1
    answer(cell, order, chunks=order.identities[48:64])
    assert list(cell.state.saves) == [order.save_id + 1]
    assert cell.state.workers["worker-0"].pool.locked == 12
    assert cell.state.counters["saves_failed"] == 1
    assert "saves_done" not in cell.state.counters
    assert len(cell.state.storages["storage"].disk.chunks) == 1
    assert [order.tokens[:4] for order in orders_of(cell, SaveChunks)] == [pack_int32([0]), pack_int32([8])]


def test_the_loss_of_the_storage_ends_its_saves(cell: CellModel) -> None:
    """Nothing stays locked for it."""
    compute(cell)

    cell.lose_storage("storage")

    assert (cell.state.saves, cell.timers) == ({}, {})
    assert cell.state.workers["worker-0"].pool.locked == 0


def test_the_loss_of_the_worker_leaves_a_save_to_its_storage(cell: CellModel) -> None:
    """What it has read is good, so its answer still counts."""
    compute(cell)
    (order,) = orders_of(cell, SaveChunks)

    cell.lose_worker("worker-0")

    assert list(cell.state.saves) == [order.save_id]
    answer(cell, order, chunks=order.identities[48:64])
    assert cell.state.saves == {}
    assert len(cell.state.storages["storage"].disk.chunks) == 1


def test_an_answer_of_nobodys_save_is_stale(cell: CellModel) -> None:
    """Answered twice, a save ends once."""
    compute(cell)
    (order,) = orders_of(cell, SaveChunks)
    answer(cell, order)
    before = cell.state.counters.get("stale_inputs", 0)

    answer(cell, order)

    assert cell.state.counters["stale_inputs"] == before + 1


def test_a_long_path_goes_in_bounded_orders_and_its_rest_after_an_answer(
    cell: CellModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is under way than a storage may have, and nothing of the path is forgotten."""
    monkeypatch.setattr(saves, "ORDER_CHUNKS", 1)
    monkeypatch.setattr(saves, "SAVING_CHUNKS", 2)
    compute(cell, list(range(330)))

    assert [order.depth for order in orders_of(cell, SaveChunks)] == [0, 64]
    cell.drain()
    assert [order.depth for order in orders_of(cell, SaveChunks)] == [0, 64, 128, 192, 256]
    assert len(cell.state.storages["storage"].disk.chunks) == 5


def test_saves_leave_most_of_a_device_to_requests(make_cell: MakeCell) -> None:
    """A second path is not locked for a save while both would be more than a quarter of the pages."""
    cell = make_cell(page_size=16, pages=60, host_pages=60, disk_chunks=50)
    compute(cell)
    compute(cell, [8] * 200)

    assert len(orders_of(cell, SaveChunks)) == 1
    assert cell.state.counters["saves_put_off_chunks"] == 3
    cell.drain()
    assert len(orders_of(cell, SaveChunks)) == 2
    assert len(cell.state.storages["storage"].disk.chunks) == 6


def test_a_page_with_a_copy_is_read_from_host_memory(make_cell: MakeCell) -> None:
    """That needs no lock, and leaves the device alone."""
    cell = make_cell(page_size=16, pages=32, host_pages=32, disk_chunks=50, disk_writes="off", host_writes="through")
    compute(cell)
    cell.drain()
    node = next(node for node in cell.state.tree.nodes.values() if node.host)
    path = path_to(cell.state, node)
    turn = Step(cell.state, cell.seq, cell.time_ns)

    save_path(turn, cell.state.storages["storage"], cell.state.workers["worker-0"], path)

    (order,) = orders(turn.outputs, SaveChunks)
    assert order.host_pages == node.host_pages("storage")
    assert set(unpack_int32(order.device_pages)) == {-1}
    assert order.worker_id == ""
    assert cell.state.workers["worker-0"].pool.locked == 0


def test_a_rotten_copy_is_not_what_is_saved(make_cell: MakeCell) -> None:
    """A quarantined copy is passed over for the device's pages."""
    cell = make_cell(page_size=16, pages=32, host_pages=32, disk_chunks=50, disk_writes="off", host_writes="through")
    compute(cell)
    cell.drain()
    node = next(node for node in cell.state.tree.nodes.values() if node.host)
    node.set_rare(quarantined=("storage",))
    path = path_to(cell.state, node)
    turn = Step(cell.state, cell.seq, cell.time_ns)

    save_path(turn, cell.state.storages["storage"], cell.state.workers["worker-0"], path)

    (order,) = orders(turn.outputs, SaveChunks)
    assert set(unpack_int32(order.host_pages)) == {-1}


def test_a_namespace_is_sealed_with_its_own_key(cell: CellModel) -> None:
    """The key that its requests named goes with every save of it, and with no other."""
    compute(cell, salt="theirs", key_id="ab" * 16)
    cell.drain()
    compute(cell, [8] * 200)

    assert [order.key_id for order in orders_of(cell, SaveChunks)] == ["ab" * 16, ""]


def test_keys_of_namespaces_that_nobody_uses_are_forgotten(cell: CellModel) -> None:
    """What is remembered of keys does not grow with the namespaces that ever were."""
    for number in range(200):
        name = cell.submit([1, 2], max_tokens=1, salt=str(number), key_id=f"{number:032x}")
        cell.cancel(name)
        cell.drain()

    assert len(cell.state.key_ids) <= 66


def test_a_save_says_how_hot_its_chunks_are(cell: CellModel) -> None:
    """The disk keeps what is worth more."""
    compute(cell)
    set_heat(cell, DOCUMENT[:192], 3, 50)
    answer(cell, orders_of(cell, SaveChunks)[0], error="again")
    set_heat(cell, DOCUMENT[:192], 3, 50)
    compute(cell)

    assert orders_of(cell, SaveChunks)[-1].value == pytest.approx(4 * 255)
