"""What a node on its way out has other nodes copy of its host memory: the hottest first, within bytes and time."""

from collections.abc import Sequence

import pytest

from services.scheduler.core.members.handover import HANDED_CHUNKS
from shared.messages.base import unpack_int32
from shared.messages.storage_events import StorageDraining
from shared.messages.storage_plans import ReleaseStorage
from tests.stateful.cell_model import CellModel
from tests.stateful.model_pages import geometry
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, set_heat, timer_of
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, host_tokens, prompt
from tests.unit.scheduler.core.sharing_nodes import KEY, A, B, fetches, two_nodes

CHUNK_BYTES = CHUNK // PAGE * geometry(PAGE).page_bytes
GRACE_MS = 27_000
"""Time enough for many tries."""


def start_drain(cell: CellModel, storage_id: str = A, *, grace_ms: int = 1_000) -> Sequence[object]:
    """A storage asks to leave; returns what follows at once."""
    cell.storages[storage_id].drain(grace_ms)
    while cell.storages[storage_id].outbox:
        cell.deliver(cell.storages[storage_id])
    return cell.outputs[-1]


def test_what_is_hot_is_on_another_node_before_the_storage_leaves(make_cell: MakeCell) -> None:
    """Its whole prefix is a host hit there, and nothing of it is computed."""
    cell = two_nodes(make_cell)

    outputs = start_drain(cell)
    (order,) = fetches(cell)
    assert order.lender is not None
    assert order.lender.storage_id == A
    assert orders(outputs, ReleaseStorage) == []
    cell.drain()
    assert list(cell.storages) == list(cell.state.storages) == [B]
    cell.lose_worker("worker-a")
    cell.serve(prompt(3))

    assert cell.admitted[-1].host_tokens == 3 * CHUNK
    assert cell.state.counters["handed_on_pages"] == 3 * CHUNK // PAGE
    assert cell.state.counters["node_drains_done"] == 1
    assert not cell.state.handing
    assert not cell.timers


@pytest.mark.parametrize("case", ["alone", "nothing is shared", "off", "empty", "with a key"])
def test_where_nothing_is_to_be_handed_on_the_storage_is_let_go_at_once(make_cell: MakeCell, case: str) -> None:
    """Also where the other node has no worker that could use it."""
    cell = two_nodes(
        make_cell,
        shares=("", "") if case == "nothing is shared" else ("engine", "engine"),
        handover_bytes=0 if case == "off" else 1 << 30,
        kinds=() if case == "empty" else (1,),
        key_id=KEY if case == "with a key" else "",
    )
    if case == "alone":
        cell.lose_worker("worker-b")

    outputs = start_drain(cell)

    assert fetches(cell) == []
    assert len(orders(outputs, ReleaseStorage)) == 1
    cell.drain()
    assert list(cell.state.storages) == [B]


def test_no_more_bytes_go_than_the_storage_named(make_cell: MakeCell) -> None:
    """Two chunks of three, from the root on."""
    cell = two_nodes(make_cell, handover_bytes=2 * CHUNK_BYTES + 1)

    start_drain(cell)
    cell.drain()

    assert host_tokens(cell, prompt(3), B) == 2 * CHUNK


def test_the_hottest_goes_first(make_cell: MakeCell) -> None:
    """There are bytes for one of three prefixes."""
    cell = two_nodes(make_cell, kinds=(1, 2, 3), handover_bytes=3 * CHUNK_BYTES)
    for kind, frequency in ((1, 2), (2, 9), (3, 1)):
        set_heat(cell, prompt(3, kind), frequency, 5)

    start_drain(cell)
    cell.drain()

    assert [host_tokens(cell, prompt(3, kind), B) for kind in (1, 2, 3)] == [0, 3 * CHUNK, 0]


@pytest.mark.parametrize(("frequency", "expected"), [(1, 3 * CHUNK), (9, 0)])
def test_a_hotter_copy_does_not_make_room(make_cell: MakeCell, frequency: int, expected: int) -> None:
    """The other node has room for one prefix, and has one that is used less, or more."""
    cell = two_nodes(make_cell, pages_of_b=6, prefetch_fraction=1.0)
    cell.lose_worker("worker-a")
    cell.serve(prompt(3, 8), max_tokens=1)
    assert host_tokens(cell, prompt(3, 8), B) == 3 * CHUNK
    set_heat(cell, prompt(3, 1), 5, 5)
    set_heat(cell, prompt(3, 8), frequency, 5)

    start_drain(cell)
    cell.drain()

    assert host_tokens(cell, prompt(3, 1), B) == expected


def test_the_end_of_the_time_lets_the_storage_go(make_cell: MakeCell) -> None:
    """Whatever is under way; it fails when the lender is gone, and nothing is lost."""
    cell = two_nodes(make_cell)
    start_drain(cell)
    cell.fire(timer_of(cell, "hand_over."))

    assert len(orders(cell.outputs[-1], ReleaseStorage)) == 1
    assert cell.state.counters["node_drains_cut_short"] == 1
    cell.serve(prompt(3))
    assert list(cell.state.storages) == [B]


def hear(cell: CellModel) -> None:
    """The other node's storage takes in what it was ordered."""
    while cell.storages[B].step():
        pass


def fail_copies(cell: CellModel, *, after_ms: int = 0) -> None:
    """What the other node copies cannot be had: its storage does not get through, and says so later."""
    hear(cell)
    cell.time_ns += after_ms * 1_000_000
    while cell.storages[B].fetch(error="the read failed"):
        cell.deliver(cell.storages[B])


def end_pause(cell: CellModel) -> None:
    """The pause is over, and the other node hears of what is ordered again."""
    cell.fire(timer_of(cell, "hand_again."))


def test_a_copy_that_failed_is_ordered_again_after_a_pause(make_cell: MakeCell) -> None:
    """The storage waits for it, what arrived is counted, and bytes that did not arrive were not used up."""
    cell = two_nodes(make_cell, handover_bytes=3 * CHUNK_BYTES)
    start_drain(cell)

    fail_copies(cell)
    assert cell.state.counters.get("handed_on_pages", 0) == 0
    assert orders(cell.outputs[-1], ReleaseStorage) == []
    assert len(fetches(cell)) == 1
    end_pause(cell)
    assert len(fetches(cell)) == 2
    cell.drain()

    assert host_tokens(cell, prompt(3), B) == 3 * CHUNK
    assert cell.state.counters["handed_on_pages"] == 3 * CHUNK // PAGE
    assert cell.state.counters["node_drains_done"] == cell.state.counters["node_drain_pauses"] == 1
    assert list(cell.state.storages) == [B]
    assert not cell.timers


def test_only_the_rest_of_a_copy_that_failed_half_way_is_ordered_again(make_cell: MakeCell) -> None:
    """Its first chunk had arrived."""
    cell = two_nodes(make_cell)
    start_drain(cell)
    hear(cell)
    cell.storages[B].fetch(chunks=1)
    cell.deliver(cell.storages[B])

    fail_copies(cell)
    end_pause(cell)
    again = fetches(cell)[-1]
    cell.drain()

    assert again.depth == CHUNK
    assert host_tokens(cell, prompt(3), B) == 3 * CHUNK
    assert cell.state.counters["handed_on_pages"] == 3 * CHUNK // PAGE


@pytest.mark.parametrize(("after_ms", "tries"), [(0, 15), (700, 11)])
def test_a_storage_that_leaves_has_copies_tried_until_its_time_is_over(
    make_cell: MakeCell, after_ms: int, tries: int
) -> None:
    """With pauses of two seconds at most. It leaves when the next pause would be longer than the time that is left."""
    cell = two_nodes(make_cell)
    start_drain(cell, grace_ms=GRACE_MS)
    ends_ns = cell.timers[timer_of(cell, "hand_over.")]

    for _ in range(tries - 1):
        fail_copies(cell, after_ms=after_ms)
        end_pause(cell)
    fail_copies(cell, after_ms=after_ms)

    assert len(fetches(cell)) == tries
    assert ends_ns - 2_000_000_000 <= cell.time_ns < ends_ns
    assert len(orders(cell.outputs[-1], ReleaseStorage)) == 1
    assert cell.state.counters["node_drains_cut_short"] == 1
    assert "node_drains_done" not in cell.state.counters
    cell.drain()
    assert list(cell.state.storages) == [B]
    assert not cell.timers


def test_a_copy_that_succeeds_after_many_failures_is_handed_on(make_cell: MakeCell) -> None:
    """The cause has passed when two thirds of the time are over."""
    cell = two_nodes(make_cell)
    start_drain(cell, grace_ms=GRACE_MS)
    for _ in range(8):
        fail_copies(cell, after_ms=500)
        end_pause(cell)

    cell.drain()

    assert host_tokens(cell, prompt(3), B) == 3 * CHUNK
    assert cell.state.counters["node_drain_pauses"] == 8
    assert cell.state.counters["node_drains_done"] == 1
    assert "node_drains_cut_short" not in cell.state.counters
    assert list(cell.state.storages) == [B]


def test_a_storage_that_stays_has_copies_tried_six_times(make_cell: MakeCell) -> None:
    """Only its last worker leaves, so nothing is lost where they fail."""
    cell = two_nodes(make_cell)
    cell.workers["worker-a"].drain(600_000)
    cell.deliver(cell.workers["worker-a"])

    for _ in range(5):
        fail_copies(cell)
        end_pause(cell)
    fail_copies(cell)

    assert len(fetches(cell)) == 6
    assert not cell.state.handing
    assert cell.state.counters["node_drains_done"] == 1
    assert orders(cell.outputs[-1], ReleaseStorage) == []
    cell.drain()
    assert list(cell.state.storages) == [A, B]


def test_a_path_that_no_node_can_take_now_waits(make_cell: MakeCell) -> None:
    """The other node's worker is away for a moment; it is back before the time is over."""
    cell = two_nodes(make_cell)
    start_drain(cell, grace_ms=GRACE_MS)
    fail_copies(cell)
    cell.lose_worker("worker-b")

    end_pause(cell)
    assert len(fetches(cell)) == 1
    assert cell.state.handing
    cell.add_worker("worker-b", node="node-b", pages=40)
    end_pause(cell)
    cell.drain()

    assert host_tokens(cell, prompt(3), B) == 3 * CHUNK
    assert cell.state.counters["node_drains_done"] == 1


def test_paths_that_wait_for_a_node_go_in_their_order(make_cell: MakeCell) -> None:
    """The hottest comes first, and there are bytes for one of them."""
    cell = two_nodes(make_cell, kinds=(1, 2, 3), handover_bytes=3 * CHUNK_BYTES)
    for kind, frequency in ((1, 2), (2, 9), (3, 1)):
        set_heat(cell, prompt(3, kind), frequency, 5)
    cell.workers["worker-a"].drain(600_000)
    cell.deliver(cell.workers["worker-a"])
    fail_copies(cell)
    cell.lose_worker("worker-b")
    end_pause(cell)

    cell.add_worker("worker-b", node="node-b", pages=40)
    end_pause(cell)
    cell.drain()

    assert [host_tokens(cell, prompt(3, kind), B) for kind in (1, 2, 3)] == [0, 3 * CHUNK, 0]


def test_where_the_other_node_is_ending_too_no_storage_waits(make_cell: MakeCell) -> None:
    """A whole cell is stopped: the copies are lost with the other storage, and no pause is made for them."""
    cell = two_nodes(make_cell)
    start_drain(cell, grace_ms=GRACE_MS)

    start_drain(cell, B, grace_ms=GRACE_MS)
    cell.drain()

    assert not cell.state.storages
    assert "node_drain_pauses" not in cell.state.counters
    assert not cell.timers


def add_third_node(cell: CellModel) -> None:
    """A node with room, which has nothing yet."""
    cell.add_storage("storage-c", node="node-c", pages=30, shares="engine", handover_bytes=1 << 40)
    cell.add_worker("worker-c", node="node-c", pages=40)
    cell.drain()


def test_copies_of_a_taker_that_is_lost_go_to_a_third_node(make_cell: MakeCell) -> None:
    """Its storage died while it copied."""
    cell = two_nodes(make_cell)
    add_third_node(cell)
    start_drain(cell, grace_ms=GRACE_MS)
    hear(cell)
    assert list(cell.storages[B].fetches)

    cell.lose_storage(B)
    end_pause(cell)
    cell.drain()

    assert host_tokens(cell, prompt(3), "storage-c") == 3 * CHUNK
    assert cell.state.counters["handed_on_pages"] == 3 * CHUNK // PAGE
    assert cell.state.counters["node_drains_done"] == 1
    assert list(cell.state.storages) == ["storage-c"]


def test_a_copy_whose_deadline_passed_is_ordered_again(make_cell: MakeCell) -> None:
    """Once its storage has answered, for a storage that owes answers gets no more copies."""
    cell = two_nodes(make_cell, handover_bytes=3 * CHUNK_BYTES, fetch_deadline_ms=4_000)
    start_drain(cell, grace_ms=GRACE_MS)
    hear(cell)

    cell.fire(timer_of(cell, "fetch."))
    end_pause(cell)
    assert len(fetches(cell)) == 1
    fail_copies(cell)
    end_pause(cell)
    cell.drain()

    assert len(fetches(cell)) == 2
    assert host_tokens(cell, prompt(3), B) == 3 * CHUNK
    assert cell.state.counters["node_drains_done"] == 1
    assert list(cell.state.storages) == [B]


def test_a_copy_whose_deadline_passed_goes_to_a_third_node(make_cell: MakeCell) -> None:
    """The first keeps its pages until it has answered."""
    cell = two_nodes(make_cell, fetch_deadline_ms=4_000)
    add_third_node(cell)
    start_drain(cell, grace_ms=GRACE_MS)
    hear(cell)

    cell.fire(timer_of(cell, "fetch."))
    end_pause(cell)
    cell.drain()

    assert host_tokens(cell, prompt(3), "storage-c") == 3 * CHUNK


def test_a_node_that_is_late_may_take_copies_later(make_cell: MakeCell) -> None:
    """The worker left first, and a copy's deadline passed. The storage that leaves then waits for the other node."""
    cell = two_nodes(make_cell, fetch_deadline_ms=4_000)
    cell.workers["worker-a"].drain(600_000)
    cell.deliver(cell.workers["worker-a"])
    hear(cell)
    cell.fire(timer_of(cell, "fetch."))

    start_drain(cell, grace_ms=GRACE_MS)

    assert not orders(cell.outputs[-1], ReleaseStorage)
    assert "node_drains_done" not in cell.state.counters


def test_paths_without_room_do_not_count_against_later_tries(make_cell: MakeCell) -> None:
    """Eight of them end a try, since colder paths would find no room either. After a pause there may be room."""
    cell = two_nodes(make_cell, kinds=(1, 2, 3))
    start_drain(cell, grace_ms=GRACE_MS)
    hear(cell)
    ordered = len(fetches(cell))
    cell.state.handing[A].refused = 8
    fail_copies(cell)

    end_pause(cell)

    assert len(fetches(cell)) == 2 * ordered


def test_nobody_begins_to_read_what_was_let_go(make_cell: MakeCell) -> None:
    """A request computes rather than to borrow from a storage that may end at any time."""
    cell = two_nodes(make_cell)
    start_drain(cell)
    cell.fire(timer_of(cell, "hand_over."))
    before = len(fetches(cell))
    cell.lose_worker("worker-a")

    cell.submit(prompt(3, 1)[: 2 * CHUNK] + prompt(1, 5))

    assert len(fetches(cell)) == before


def test_a_taker_that_dies_is_replaced_by_nobody_and_the_storage_leaves(make_cell: MakeCell) -> None:
    """There is no third node."""
    cell = two_nodes(make_cell)
    start_drain(cell)

    cell.lose_storage(B)
    cell.drain()

    assert list(cell.state.storages) == []
    assert cell.state.counters["node_drains_done"] == 1


def test_what_another_node_has_is_not_copied(make_cell: MakeCell) -> None:
    """It was lent before, so both have it."""
    cell = two_nodes(make_cell)
    cell.lose_worker("worker-a")
    cell.serve(prompt(3))
    before = len(fetches(cell))

    start_drain(cell)
    cell.drain()

    assert len(fetches(cell)) == before
    assert list(cell.state.storages) == [B]


def test_the_last_worker_of_a_node_does_not_wait_for_it(make_cell: MakeCell) -> None:
    """Its node's copies go while it drains, and the storage stays."""
    cell = two_nodes(make_cell)

    cell.workers["worker-a"].drain(1_000)
    cell.drain()

    assert list(cell.state.workers) == ["worker-b"]
    assert list(cell.state.storages) == [A, B]
    assert host_tokens(cell, prompt(3), B) == 3 * CHUNK
    assert not cell.state.handing


def test_a_repeated_word_changes_nothing(make_cell: MakeCell) -> None:
    """The storage is released once."""
    cell = two_nodes(make_cell)
    start_drain(cell)
    storage = cell.storages[A]
    word = StorageDraining(storage_id=A, incarnation=storage.incarnation, grace_ms=1_000)

    cell.feed(word)
    cell.drain()
    cell.feed(word)

    assert cell.state.counters["node_drains_started"] == 1


def test_a_long_path_goes_in_several_fetches(make_cell: MakeCell) -> None:
    """Each is short enough for others to come in between."""
    settings = {"host_writes": "through", "prefetch_fraction": 1.0, "max_batch_tokens": 8192}
    cell = make_cell(page_size=PAGE, workers=0, host_pages=0, **settings)
    chunks = HANDED_CHUNKS + 2
    for storage_id, node, worker in ((A, "node", "worker-a"), (B, "node-b", "worker-b")):
        cell.add_storage(storage_id, node=node, pages=400, shares="engine", handover_bytes=1 << 40)
        cell.add_worker(worker, node=node, pages=400)
        if storage_id == A:
            cell.submit(prompt(chunks), max_tokens=1)
        cell.drain()

    start_drain(cell)
    cell.drain()

    assert [len(unpack_int32(order.host_pages)) * PAGE // CHUNK for order in fetches(cell)] == [HANDED_CHUNKS, 2]
    assert host_tokens(cell, prompt(chunks), B) == chunks * CHUNK
