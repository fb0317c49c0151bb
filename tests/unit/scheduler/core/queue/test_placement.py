"""Where requests go."""

import pytest

from services.scheduler.core.queue import queueing
from services.scheduler.core.request import Request
from services.scheduler.core.step import Step
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_on_disk
from tests.unit.scheduler.core.restoring_cells import put_hidden


def placed(cell: CellModel, name: str) -> str:
    """The worker that a request was given to."""
    return cell.state.requests[name].worker_id


def test_a_request_goes_where_its_prefix_is(make_cell: MakeCell) -> None:
    """Cached tokens outweigh an equal backlog, on whichever worker they are."""
    cell = make_cell(workers=2, pages=64)
    cell.submit([9] * 40, request_id="other")
    cell.submit(list(range(40)), request_id="first")
    home = placed(cell, "first")
    assert home != placed(cell, "other")
    cell.drain()

    cell.submit([*range(40), 7], request_id="second")

    assert placed(cell, "second") == home


def test_a_long_backlog_outweighs_a_short_prefix(make_cell: MakeCell) -> None:
    """Waiting behind much work is worse than computing a little."""
    cell = make_cell(workers=2, pages=64)
    cell.submit([1, 2, 3, 4], request_id="first")
    assert placed(cell, "first") == "worker-0"
    cell.drain()
    cell.submit([50] * 100, request_id="long")
    assert placed(cell, "long") == "worker-0"

    cell.submit([1, 2, 3, 4, 5], request_id="second")

    assert placed(cell, "second") == "worker-1"


def test_ties_go_to_the_worker_that_joined_first(make_cell: MakeCell) -> None:
    """Equal estimates do not depend on names."""
    cell = make_cell(workers=0)
    cell.add_worker("z")
    cell.add_worker("a")

    cell.submit([1, 2, 3], request_id="first")

    assert placed(cell, "first") == "z"


def test_waiting_requests_move_when_a_worker_joins(make_cell: MakeCell) -> None:
    """A new worker takes its share of what already waits."""
    cell = make_cell(max_running=1)
    for number in range(4):
        cell.submit([number] * 8, request_id=f"r{number}")

    cell.add_worker("worker-1")

    assert [request.worker_id for request in cell.state.requests.values()].count("worker-1") >= 1
    cell.drain()


def test_host_copies_count_for_part_of_their_worth(make_cell: MakeCell) -> None:
    """A worker whose node has the prefix in host memory beats one that has it nowhere."""
    cell = make_cell(pages=14, host_pages=40)
    cell.serve(list(range(40)))
    for number in range(2):
        cell.serve([100 + number] * 40)
    cell.add_worker("elsewhere", node="node-2", pages=14)

    cell.submit([*range(40), 7], request_id="again")

    assert placed(cell, "again") == "worker-0"
    cell.drain()
    assert cell.admitted[-1].host_tokens > 0


def test_a_request_goes_where_its_prefix_is_being_computed(make_cell: MakeCell) -> None:
    """What another is about to bring is worth as much as what is cached, if waiting for it is cheaper."""
    cell = make_cell(workers=2, pages=128, defer_tokens=8)
    cell.submit([7] * 4, request_id="small")
    cell.submit([1] * 200, request_id="first")
    assert (placed(cell, "small"), placed(cell, "first")) == ("worker-0", "worker-1")

    cell.submit([*[1] * 200, 2], request_id="second")

    assert placed(cell, "second") == "worker-1"
    cell.drain()
    assert cell.state.counters["prefill_tokens_planned"] == 4 + 200 + 1


def test_a_busy_producer_is_not_waited_for(make_cell: MakeCell) -> None:
    """Computing a prefix twice beats standing behind much other work."""
    cell = make_cell(workers=2, pages=512, defer_tokens=8)
    cell.submit([7] * 100, request_id="other")
    cell.submit([1] * 100, request_id="first")
    for number in range(20, 40):
        cell.submit([*[1] * 100, *[number] * 60], request_id=f"r{number}")

    workers = [placed(cell, f"r{number}") for number in range(20, 40)]
    assert "worker-0" in workers
    assert workers[0] == "worker-1"


def test_measured_speed_decides_between_unequal_workers(make_cell: MakeCell) -> None:
    """A worker that computes ten times as fast gets the work, though the other joined first."""
    cell = make_cell(workers=2)
    for name, time in (("worker-0", 100_000), ("worker-1", 10_000)):
        cell.state.workers[name].speed.note_compute(100, 5000, time)

    cell.submit([1] * 40, request_id="first")

    assert placed(cell, "first") == "worker-1"


def test_of_many_workers_a_holder_of_the_prefix_is_found(make_cell: MakeCell) -> None:
    """A cell of forty compares few of them, and those that hold something are among these."""
    cell = make_cell(workers=40, pages=32)
    for number in range(40):
        cell.submit([number] * 40, request_id=f"r{number}")
    homes = {number: placed(cell, f"r{number}") for number in range(40)}
    assert len(set(homes.values())) == 40
    cell.drain()

    for number in (3, 17, 39):
        name = cell.submit([*[number] * 40, 99])
        assert placed(cell, name) == homes[number]


def test_an_idle_worker_takes_over_what_waits_elsewhere(make_cell: MakeCell) -> None:
    """When it has nothing left, it takes the waiting request that loses least by moving."""
    cell = make_cell(workers=2, pages=256, max_running=1, defer_tokens=0)
    cell.submit([1] * 80, request_id="long", max_tokens=60, ignore_eos=True)
    cell.submit([2] * 100, request_id="short", max_tokens=1)
    assert (placed(cell, "long"), placed(cell, "short")) == ("worker-0", "worker-1")
    for number in range(4):
        cell.submit([1] * 80 + [3 + number] * 40, request_id=f"q{number}")
    before = {name: request.worker_id for name, request in cell.state.requests.items()}
    assert list(before.values()).count("worker-0") >= 3

    cell.drain()

    assert cell.state.counters["requests_stolen"] >= 1
    assert cell.gateways["gateway"].ended == dict.fromkeys(before, "finished")


def test_a_request_is_not_moved_to_where_it_would_end_later(make_cell: MakeCell) -> None:
    """An idle worker leaves alone what finds its long prefix where it waits."""
    cell = make_cell(workers=0, max_running=1)
    cell.add_worker("worker-0", pages=256)
    cell.serve([1] * 400, request_id="first", max_tokens=1)
    cell.submit([1] * 400 + [2], request_id="second", max_tokens=20, ignore_eos=True)
    cell.submit([1] * 400 + [3], request_id="third", max_tokens=1)

    cell.add_worker("worker-1", pages=256, node="other")

    assert placed(cell, "third") == "worker-0"
    assert cell.state.counters.get("requests_stolen", 0) == 0
    cell.drain()


def test_only_the_queue_of_a_lost_worker_moves(make_cell: MakeCell) -> None:
    """Requests that wait elsewhere stay where they are, and deferred ones are placed anew."""
    cell = make_cell(workers=2, pages=256, max_running=1, defer_tokens=8)
    for number in range(8):
        cell.submit([number % 2] * 60 + [50 + number] * 4, request_id=f"r{number}")
    stays = {name for name, request in cell.state.requests.items() if request.worker_id == "worker-1"}
    assert 0 < len(stays) < 8

    cell.lose_worker("worker-0")

    assert all(cell.state.requests[name].worker_id == "worker-1" for name in stays)
    cell.answer_resume("gateway")
    cell.drain()
    assert len(cell.gateways["gateway"].ended) == 8


def two_nodes_with_disks(make_cell: MakeCell) -> CellModel:
    """Each node has a worker and a storage; only the second node's disk holds the prompt."""
    cell = make_cell(page_size=PAGE, pages=64, prefetch_wait="full")
    cell.add_storage("other", pages=40, disk_chunks=100)
    cell.add_storage("storage", pages=40, disk_chunks=100, node="node-2")
    cell.add_worker("worker-1", pages=64, node="node-2")
    cell.drain()
    put_on_disk(cell, prompt(3))
    return cell


def test_a_request_goes_where_the_disk_holds_its_prefix(make_cell: MakeCell) -> None:
    """Fetching is taken to cost less than computing as long as nobody knows better."""
    cell = two_nodes_with_disks(make_cell)

    cell.serve(prompt(3))

    assert cell.admitted[-1].disk_tokens == 3 * CHUNK
    assert cell.state.workers["worker-1"].pool.cached > 0


def test_a_disk_that_is_slower_than_computing_attracts_nobody(make_cell: MakeCell) -> None:
    """What was measured of it counts."""
    cell = two_nodes_with_disks(make_cell)
    storage = cell.state.storages["storage"]
    storage.fetching.tokens, storage.fetching.us = 1.0, 1e9

    cell.submit(prompt(3))

    assert cell.admitted[-1].cached_tokens == 0
    assert cell.state.workers["worker-0"].work.running


def test_a_request_goes_where_the_disk_holds_its_state(make_cell: MakeCell) -> None:
    """Restoring there is cheaper than computing elsewhere."""
    cell = make_cell(page_size=PAGE, workers=0, hidden_form="0/1/0")
    cell.restoration = COSTS
    cell.add_storage("other", pages=40, disk_chunks=100, hidden_pages=40)
    cell.add_storage("storage", pages=40, disk_chunks=100, hidden_pages=40, node="node-2")
    cell.add_worker("worker-0", pages=64)
    cell.add_worker("worker-1", pages=64, node="node-2")
    cell.drain()
    put_hidden(cell, prompt(3))

    name = cell.submit(prompt(3))

    assert placed(cell, name) == "worker-1"
    assert cell.state.requests[name].hidden.run is not None
    cell.drain()
    assert cell.workers["worker-1"].restored_tokens == 3 * CHUNK


def test_a_join_places_a_bounded_number_anew(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in line are weighed again; the others stay until somebody is idle. Nothing is lost."""
    monkeypatch.setattr(queueing, "MOST_REPLACED", 3)
    weighed: list[str] = []
    enqueue = queueing.enqueue

    def weigh(step: Step, request: Request) -> None:
        weighed.append(request.request_id)
        enqueue(step, request)

    monkeypatch.setattr(queueing, "enqueue", weigh)
    cell = make_cell(max_running=1)
    for number in range(9):
        cell.submit([number] * 8, max_tokens=1, request_id=f"r{number}")
    weighed.clear()

    cell.add_worker("worker-1")

    assert weighed == ["r1", "r2", "r3"]
    cell.drain()
    assert not cell.state.requests


def test_a_first_worker_gets_all_that_nobody_has(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was accepted while there was no worker is placed, however much it is."""
    monkeypatch.setattr(queueing, "MOST_REPLACED", 1)
    cell = make_cell(workers=0)
    for number in range(4):
        cell.submit([number] * 8, max_tokens=1)

    cell.add_worker("worker-0")

    assert not cell.state.unplaced
    cell.drain()
