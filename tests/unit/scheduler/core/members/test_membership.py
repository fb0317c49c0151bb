"""Workers come and go."""

from typing import Any

import pytest

from services.scheduler.core import status
from shared.messages.gateway_notices import RequestFailed, ResumeNeeded
from shared.messages.pools import PoolHandle
from shared.messages.storage_plans import AttachDevicePool, CreateHostPool, DetachDevicePool
from shared.messages.worker_events import KernelFacts, WorkerJoined, WorkerLeft
from shared.messages.worker_plans import AttachHostPool, Dismiss, WorkerPlan
from tests.stateful.cell_model import MODEL, CellModel, geometry
from tests.unit.scheduler.core.cell_fixtures import MakeCell, host_pool, orders


def join(
    cell: CellModel,
    *,
    worker_id: str = "stranger",
    model: str = MODEL,
    page_size: int = 4,
    pages: int = 8,
    incarnation: str = "x",
    kernels: KernelFacts | None = None,
) -> WorkerJoined:
    """A WorkerJoined without a model worker behind it."""
    handle = PoolHandle(kind="shm", layout="layer_first", name="x", nbytes=0, pages=pages, geometry=geometry(page_size))
    return WorkerJoined(
        worker_id=worker_id,
        incarnation=incarnation,
        node="node",
        model=model,
        pool=handle,
        max_context=100,
        kernels=kernels,
    )


def kernels(epoch: int, files: str = "files") -> KernelFacts:
    """Those of a release that is called like its epoch."""
    return KernelFacts(files=files, epoch=epoch, release=f"0.{epoch}.0")


@pytest.mark.parametrize("difference", [{"model": "another"}, {"page_size": 8}, {"pages": 0}])
def test_a_worker_that_cannot_serve_here_is_dismissed(make_cell: MakeCell, difference: dict[str, Any]) -> None:
    """The first worker fixes model and geometry while any worker is joined."""
    cell = make_cell()
    cell.known_workers["stranger", "x"] = type("Sink", (), {"receive": staticmethod(lambda plan: None)})()

    (output,) = cell.feed(join(cell, **difference))

    assert isinstance(output, WorkerPlan)
    assert isinstance(output.order, Dismiss)
    assert (output.worker_id, output.incarnation, output.number) == ("stranger", "x", 1)
    assert list(cell.state.workers) == ["worker-0"]


def reason(cell: CellModel, message: WorkerJoined) -> str:
    """What a dismissed worker is told."""
    cell.known_workers[message.worker_id, message.incarnation] = type("Sink", (), {"receive": lambda _, plan: None})()
    (output,) = cell.feed(message)
    assert isinstance(output, WorkerPlan)
    assert isinstance(output.order, Dismiss)
    return output.order.reason


def test_a_worker_whose_kernels_compute_other_bits_is_told_so(make_cell: MakeCell) -> None:
    """The same model by kernels of another release is not another model."""
    cell = make_cell(workers=0)
    assert not orders(cell.feed(join(cell, worker_id="first", model="old", kernels=kernels(2))), Dismiss)

    told = reason(cell, join(cell, model="new", kernels=kernels(3)))
    stranger = reason(cell, join(cell, model="stranger", kernels=kernels(2, "other")))

    assert (
        "this worker's are of release 0.3.0 (numerics epoch 3), the cell's of release 0.2.0 (numerics epoch 2)" in told
    )
    assert stranger == "the cell serves another model"
    assert status(cell.state, "s").kernels == kernels(2)


def test_kernels_of_a_release_that_does_not_name_them_may_be_the_difference(make_cell: MakeCell) -> None:
    """In a running cell whose workers, or whose new worker, are of an earlier release."""
    cell = make_cell()
    assert cell.state.kernels is None

    new = reason(cell, join(cell, model="new", kernels=kernels(2)))
    newer_cell = make_cell(workers=0)
    newer_cell.feed(join(newer_cell, worker_id="first", model="new", kernels=kernels(2)))
    old = reason(newer_cell, join(newer_cell, model="old"))

    assert "those of the cell are of a release that does not name its numerics epoch" in new
    assert "those of this worker are of a release that does not name its numerics epoch" in old


def test_an_empty_cell_takes_the_kernels_of_its_next_worker(make_cell: MakeCell) -> None:
    """Requests that wait are told why they end: their KV has names of the earlier kernels."""
    cell = make_cell(workers=0)
    cell.feed(join(cell, worker_id="first", model="old", kernels=kernels(2)))
    cell.feed(WorkerLeft(worker_id="first", incarnation="x"))
    cell.submit([1] * 4)

    outputs = cell.feed(join(cell, model="new", kernels=kernels(3)))

    assert cell.state.kernels == kernels(3)
    (failed,) = orders(outputs, RequestFailed)
    assert "kernels of another release" in failed.message


def test_pools_are_introduced_in_order(make_cell: MakeCell) -> None:
    """The storage makes its pool once and maps each device; a worker gets the host pool once it exists."""
    cell = make_cell(workers=0)
    cell.add_storage("storage")
    assert cell.outputs[-1] == []

    cell.add_worker("one")
    assert [type(order) for order in orders(cell.outputs[-1], object)] == [CreateHostPool, AttachDevicePool]
    cell.drain()
    cell.add_worker("two")

    assert len(orders(cell.outputs[-1], AttachDevicePool)) == 1
    assert len(orders(cell.outputs[-1], AttachHostPool)) == 1
    assert orders(cell.outputs[-1], CreateHostPool) == []
    assert sorted(cell.workers["one"].hosts) == ["storage"]


def test_a_storage_of_another_node_is_not_introduced(make_cell: MakeCell) -> None:
    """Memory is shared on a node only."""
    cell = make_cell(workers=0)
    cell.add_storage("storage", node="far")
    cell.add_worker("one", node="near")
    cell.drain()

    assert cell.workers["one"].hosts == {}
    assert cell.storages["storage"].devices == {}


@pytest.mark.parametrize("is_graceful", [True, False])
def test_requests_of_a_lost_worker_go_on_elsewhere(make_cell: MakeCell, is_graceful: bool) -> None:
    """Waiting ones move, running ones resume after the tokens that their gateway has, and tokens never change."""
    cell = make_cell(workers=2, pages=64, max_running=1, host_pages=20)
    names = [cell.submit([number] * 10, max_tokens=12, ignore_eos=True) for number in range(4)]
    for _ in range(4):
        cell.round()
    worker = cell.workers.pop("worker-0")
    moved = [request.request_id for request in cell.state.requests.values() if request.worker_id == "worker-0"]

    if is_graceful:
        outputs = cell.feed(WorkerLeft(worker_id="worker-0", incarnation=worker.incarnation))
    else:
        cell.workers["worker-0"] = worker
        cell.lose_worker("worker-0")
        outputs = cell.outputs[-1]

    assert moved
    counted = [cell.state.counters.get(name, 0) for name in ("workers_left", "workers_lost")]
    assert counted == ([1, 0] if is_graceful else [0, 1])
    assert len(orders(outputs, ResumeNeeded)) == 1
    assert orders(outputs, ResumeNeeded)[0].attempt == 2
    assert len(orders(outputs, DetachDevicePool)) == 1
    cell.drain()
    gateway = cell.gateways["gateway"]
    assert gateway.ended == dict.fromkeys(gateway.ended, "finished")
    assert sorted(gateway.ended) == sorted(names)
    assert all(len(gateway.tokens[name]) == 12 for name in names)


def test_a_new_incarnation_means_the_old_one_is_lost(make_cell: MakeCell) -> None:
    """Its pages are gone and its requests resume; events of the old one are stale."""
    cell = make_cell(pages=64)
    name = cell.submit([1] * 10, max_tokens=6, ignore_eos=True)
    cell.round()
    old = cell.workers["worker-0"]
    while old.step():
        pass
    assert old.outbox

    cell.add_worker("worker-0", pages=64)
    stale = cell.state.counters.get("stale_inputs", 0)
    while cell.deliver(old):
        pass

    assert cell.state.counters["stale_inputs"] > stale
    cell.drain()
    assert cell.gateways["gateway"].ended == {name: "finished"}


def test_the_cache_of_other_workers_survives(make_cell: MakeCell) -> None:
    """Only what the lost worker alone held is gone."""
    cell = make_cell(workers=2, pages=64)
    cell.submit([1] * 20, max_tokens=1, request_id="a")
    cell.serve([2] * 20, max_tokens=1, request_id="b")

    cell.lose_worker("worker-0")

    (pool,) = status(cell.state, "x").pools
    assert (pool.owner, pool.cached) == ("worker-1", 5)


def test_the_last_worker_gone_another_model_may_be_served(make_cell: MakeCell) -> None:
    """Requests that wait are of the old model and are told; pages of another geometry are gone."""
    cell = make_cell(host_pages=30, pages=12)
    for number in range(2):
        cell.serve([number] * 40, max_tokens=1)
    cell.lose_worker("worker-0")
    assert host_pool(cell).cached > 0
    name = cell.submit([3] * 4)
    cell.known_workers["stranger", "x"] = type("Sink", (), {"receive": staticmethod(lambda plan: None)})()

    outputs = cell.feed(join(cell, model="another", page_size=8))

    assert cell.gateways["gateway"].ended[name] == "service_unavailable"
    assert cell.state.model == "another"
    assert cell.state.tree.page_size == 8
    assert cell.state.tree.nodes == {}
    assert any(isinstance(output.order, CreateHostPool) for output in outputs if hasattr(output, "order"))
