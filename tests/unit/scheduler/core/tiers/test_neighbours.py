"""Loads from the device of another worker of the node."""

import pytest

from services.scheduler.core.cache.prefix_match import nearest_holder
from shared.messages.cell_events import CellConfig, CellConfigured, FlushCache
from shared.messages.worker_plans import AttachNeighbour, DetachNeighbour, WorkerPlan
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, loads_of, nodes_of, orders, worker_goes_on

DOCUMENT = list(range(40))


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """Two workers of a node; the first has computed a document, and is busy."""
    cell = make_cell(workers=2, pages=64)
    cell.serve(DOCUMENT, max_tokens=1, request_id="first")
    assert "worker-0" in nodes_of(cell, DOCUMENT)[0].device
    cell.serve([91] * 100, max_tokens=20, ignore_eos=True, request_id="elsewhere")
    cell.submit([*DOCUMENT, *[90] * 100], max_tokens=20, ignore_eos=True, request_id="busy")
    assert cell.state.requests["busy"].worker_id == "worker-0"
    return cell


def test_a_prefix_is_copied_from_the_device_that_has_it(cell: CellModel) -> None:
    """The load names the neighbour and its pages, and usage says where the tokens came from."""
    cell.submit([*DOCUMENT, 7], max_tokens=1, request_id="next")
    (load,) = loads_of(cell)
    (node,) = nodes_of(cell, DOCUMENT)
    cell.drain()

    admitted = next(order for order in cell.admitted if order.request_id == "next")
    assert (load.neighbour_id, load.storage_id) == ("worker-0", "")
    assert load.neighbour_incarnation == cell.workers["worker-0"].incarnation
    assert load.host_pages == node.device_pages("worker-0")
    assert load.device_pages == node.device_pages("worker-1")
    assert (admitted.cached_tokens, admitted.neighbour_tokens, admitted.host_tokens) == (40, 40, 0)
    assert cell.state.counters["hit_tokens_neighbour"] == 40


def test_what_a_neighbour_reads_is_locked_until_the_batch_is_answered(cell: CellModel) -> None:
    """Its worker evicts it for nobody, whoever needs the pages."""
    cell.cancel("busy")
    cell.round()
    cell.submit([*DOCUMENT, *[92] * 60], max_tokens=1, request_id="busy again")
    cell.submit([*DOCUMENT, 7], max_tokens=1, request_id="next")
    cell.cancel("busy again")
    for _ in range(4):
        worker_goes_on(cell)

    cell.feed(FlushCache(call_id="flush", tiers=("device",)))
    (load,) = loads_of(cell)
    assert load.neighbour_id == "worker-0"
    assert nodes_of(cell, DOCUMENT)[0].locks["worker-0"] == 1
    cell.drain()
    assert "worker-0" not in nodes_of(cell, DOCUMENT)[0].locks


def test_a_failed_load_is_recomputed_and_not_tried_again(cell: CellModel) -> None:
    """The answer is right, and no later request of this worker copies from that neighbour."""
    cell.workers["worker-1"].fails_neighbour_loads = True
    cell.serve([*DOCUMENT, 7], max_tokens=1, request_id="next")

    assert cell.gateways["gateway"].ended["next"] == "finished"
    assert cell.state.counters["neighbours_distrusted"] == 1
    assert cell.state.workers["worker-1"].moves.neighbours == {"worker-0": False}
    assert cell.state.counters["neighbour_loads_started"] == 1
    assert all(order.neighbour_tokens == 0 for order in cell.admitted if order.attempt == 2)


def test_a_neighbour_that_comes_back_is_trusted_again(cell: CellModel) -> None:
    """Its pool is another one."""
    cell.workers["worker-1"].fails_neighbour_loads = True
    cell.serve([*DOCUMENT, 7], max_tokens=1, request_id="next")

    cell.lose_worker("worker-0")
    cell.add_worker("worker-0", pages=64)

    assert cell.state.workers["worker-1"].moves.neighbours == {"worker-0": True}


@pytest.mark.parametrize("lost", ["worker-0", "worker-1"])
def test_a_load_outlives_neither_of_its_workers(cell: CellModel, lost: str) -> None:
    """Its request ends well, and nothing stays locked on a device that is gone."""
    cell.submit([*DOCUMENT, 7], max_tokens=1, request_id="next")

    cell.lose_worker(lost)

    held = {name: node.locks for node in nodes_of(cell, DOCUMENT) for name in node.locks}
    assert lost not in held
    cell.drain()
    assert cell.gateways["gateway"].ended["next"] == "finished"


def late_reads(cell: CellModel) -> list[str]:
    """The timers of what lost workers may still be reading."""
    return [timer_id for timer_id, timer in cell.state.timers.items() if timer.kind == "reads"]


def test_what_a_lost_worker_was_reading_stays_locked_for_a_while(cell: CellModel) -> None:
    """It may only have stood still: read later, other pages would give wrong tokens that a gateway still takes."""
    cell.submit([*DOCUMENT, 7], max_tokens=1, request_id="next")

    cell.lose_worker("worker-1")
    cell.drain()
    cell.feed(FlushCache(call_id="flush"))

    assert "worker-0" in nodes_of(cell, DOCUMENT)[0].locks
    (timer_id,) = late_reads(cell)
    cell.fire(timer_id)
    cell.feed(FlushCache(call_id="again"))
    assert not nodes_of(cell, DOCUMENT)
    assert not cell.state.late_reads


def test_what_is_read_of_a_lost_neighbour_is_let_go_with_it(cell: CellModel) -> None:
    """Its device is gone, whoever maps it still."""
    cell.submit([*DOCUMENT, 7], max_tokens=1, request_id="next")
    cell.lose_worker("worker-1")

    cell.lose_worker("worker-0")

    (timer_id,) = late_reads(cell)
    cell.fire(timer_id)
    assert not cell.state.late_reads


def test_a_worker_that_was_reading_nothing_leaves_no_locks(cell: CellModel) -> None:
    """A loss costs nothing where no load was under way."""
    cell.lose_worker("worker-1")

    assert not late_reads(cell)


def test_workers_of_a_node_are_told_of_one_another(make_cell: MakeCell) -> None:
    """Each maps the others' pools as they come, and lets go of them as they leave; other nodes are not concerned."""
    cell = make_cell(workers=0)
    cell.add_worker("one")
    cell.add_worker("far", node="far")
    cell.add_worker("two")

    joined = [
        (output.worker_id, output.order.worker_id)
        for output in cell.outputs[-1]
        if isinstance(output, WorkerPlan) and isinstance(output.order, AttachNeighbour)
    ]
    cell.drain()
    assert sorted(joined) == [("one", "two"), ("two", "one")]
    cell.lose_worker("two")
    (detached,) = orders(cell.outputs[-1], DetachNeighbour)
    assert detached.worker_id == "two"
    cell.drain()
    assert cell.workers["one"].neighbours == {}
    assert cell.workers["far"].neighbours == {}


def test_switched_off_nobody_is_told_and_nothing_is_copied(make_cell: MakeCell) -> None:
    """Then the prefix is computed again where the request runs."""
    cell = make_cell(workers=2, neighbour_loads=False)
    for tail in (7, 8):
        cell.submit([*DOCUMENT, *[tail] * 30], max_tokens=3)
    cell.drain()

    assert not any(orders(outputs, AttachNeighbour) for outputs in cell.outputs)
    assert "neighbour_loads_started" not in cell.state.counters


def test_switched_on_later_workers_are_told_then(make_cell: MakeCell) -> None:
    """And told once, however often the cell is configured."""
    cell = make_cell(workers=2, neighbour_loads=False)

    for _ in range(2):
        cell.feed(CellConfigured(config=CellConfig()))

    told = [len(orders(outputs, AttachNeighbour)) for outputs in cell.outputs[-2:]]
    assert told == [2, 0]


def test_one_path_may_come_from_everywhere(make_cell: MakeCell) -> None:
    """What the device lacks is copied from host memory where there is a copy, and from the neighbour where not."""
    cell = make_cell(workers=2, pages=64, host_pages=64, host_writes="selective", admission_frequency=2)
    parts = [[number] * 20 for number in range(4)]
    sequence = [token for part in parts for token in part]
    cell.serve(sequence[:20], max_tokens=1)
    cell.serve(sequence, max_tokens=1)
    first, rest = nodes_of(cell, sequence)
    assert ("storage" in first.host, "storage" in rest.host) == (True, False)
    name = next(iter(rest.device))
    cell.submit([*sequence, *[90] * 100], max_tokens=20, ignore_eos=True, request_id="busy")
    other = "worker-1" if cell.state.requests["busy"].worker_id == "worker-0" else "worker-0"
    cell.submit([*sequence, 7], max_tokens=1, request_id="next")
    assert cell.state.requests["next"].worker_id == other

    host, near = loads_of(cell)
    assert (host.storage_id, host.neighbour_id) == ("storage", "")
    assert (near.storage_id, near.neighbour_id) == ("", name)
    admitted = next(order for order in cell.admitted if order.request_id == "next")
    assert (admitted.host_tokens, admitted.neighbour_tokens) == (20, 60)
    assert host.device_pages + near.device_pages == admitted.pages[: 20 * 4]
    cell.drain()


def test_the_first_neighbour_that_joined_is_asked(make_cell: MakeCell) -> None:
    """Of two that have the same pages, whichever had them first."""
    cell = make_cell(workers=3, pages=64)
    cell.serve(DOCUMENT, max_tokens=1)
    (node,) = nodes_of(cell, DOCUMENT)
    pages = node.device_pages("worker-0")
    workers = cell.state.workers

    node.take_from_device("worker-0")
    for name in ("worker-1", "worker-0"):
        node.put_on_device(name, pages)

    assert nearest_holder(cell.state, workers["worker-2"], node) == "worker-0"
    assert nearest_holder(cell.state, workers["worker-0"], node) == "worker-1"


def test_those_who_share_a_load_from_a_neighbour_say_where_it_came_from(make_cell: MakeCell) -> None:
    """One copy serves both requests of the batch, and both had the tokens from the neighbour."""
    cell = make_cell(workers=2, pages=64, batches_ahead=1)
    cell.serve(DOCUMENT, max_tokens=1)
    cell.submit([*DOCUMENT, *[90] * 100], max_tokens=20, ignore_eos=True)
    cell.submit([93] * 8, max_tokens=1, request_id="filler")
    assert cell.state.requests["filler"].worker_id == "worker-1"
    for number in (7, 8):
        cell.submit([*DOCUMENT, number], max_tokens=1, request_id=f"next-{number}")
    worker_goes_on(cell, "worker-1")

    shared = [order for order in cell.admitted if order.request_id.startswith("next-")]
    assert [order.neighbour_tokens for order in shared] == [40, 40]
    assert [order.host_tokens for order in shared] == [0, 0]
    assert len(loads_of(cell)) == 1
    cell.drain()
    assert cell.state.counters["hit_tokens_neighbour"] == 80
