"""Adapters of a cell: who loads them, who computes with them, and when they go."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.core import status
from services.scheduler.core.fold.snapshot import decode_state, encode_state
from shared.messages.cell_events import LoadAdapter, UnloadAdapter
from shared.messages.gateway_notices import RequestFailed
from shared.messages.requests import Importance
from shared.messages.status import AdapterStatus
from shared.messages.worker_events import AdapterAttached
from shared.messages.worker_plans import AttachAdapter, DetachAdapter
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, timer_of

ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32


def load(cell: CellModel, name: str, digest: str, path: str = "folder") -> None:
    cell.feed(LoadAdapter(name=name, path=path, digest=digest))


def replace(cell: CellModel, name: str, digest: str, path: str = "folder", *, expects: str = ONE) -> None:
    cell.feed(LoadAdapter(name=name, path=path, digest=digest, expects=expects))


def named(cell: CellModel) -> list[tuple[str, str]]:
    return [(each.name, each.digest) for each in told(cell)]


def failures(cell: CellModel) -> list[tuple[str, str]]:
    """Code and text of every failure that was told."""
    return [(word.code, word.message) for word in orders_of(cell, RequestFailed)]


def told(cell: CellModel) -> list[AdapterStatus]:
    return list(status(cell.state, "model").adapters)


def test_every_worker_loads_what_the_cell_has(make_cell: MakeCell) -> None:
    """Workers that are there are told at once, one that joins later when it joins."""
    cell = make_cell(workers=2)
    load(cell, "tuned", ONE)
    assert len(orders(cell.outputs[-1], AttachAdapter)) == 2
    cell.drain()

    cell.add_worker("late")
    cell.drain()

    (adapter,) = told(cell)
    assert (adapter.name, adapter.digest, adapter.path) == ("tuned", ONE, "folder")
    assert adapter.workers == ("worker-0", "worker-1", "late")


def test_requests_wait_until_a_worker_has_the_adapter(make_cell: MakeCell) -> None:
    """A request is placed nowhere while the adapter is being loaded, and everybody else is served."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    adapted = cell.submit([1, 2, 3, 4, 5], adapter=ONE)
    plain = cell.submit([1, 2, 3, 4, 5])
    assert list(cell.state.unplaced) == [adapted]
    assert [order.request_id for order in cell.admitted] == [plain]

    cell.drain()

    admissions = {order.request_id: order.adapter for order in cell.admitted}
    assert admissions == {plain: "", adapted: ONE}


def test_requests_go_where_the_adapter_is(make_cell: MakeCell) -> None:
    """A worker that could not load an adapter gets none of its requests, however idle it is."""
    cell = make_cell(workers=2)
    load(cell, "tuned", ONE)
    broken, sound = cell.workers["worker-0"], cell.workers["worker-1"]
    while sound.step():
        pass
    cell.deliver(sound)
    (plan,) = broken.inbox
    broken.inbox.clear()
    assert isinstance(plan.order, AttachAdapter)
    cell.feed(
        AdapterAttached(
            worker_id="worker-0",
            incarnation=broken.incarnation,
            attach_id=plan.order.attach_id,
            digest=ONE,
            fault="no memory",
        )
    )

    requests = [cell.submit([number, 2, 3, 4, 5], adapter=ONE) for number in range(4)]

    assert {cell.state.requests[name].worker_id for name in requests} == {"worker-1"}
    assert told(cell)[0].faults == {"worker-0": "no memory"}
    cell.drain()


def test_prefixes_of_one_adapter_are_no_hits_for_others(make_cell: MakeCell) -> None:
    """The same prompt is found again with the same adapter, whatever it is called, and by nobody else."""
    cell = make_cell()
    load(cell, "one", ONE)
    load(cell, "two", TWO)
    cell.drain()
    prompt = list(range(9))
    for adapter in ("", ONE, TWO, "", ONE, TWO):
        cell.serve(prompt, adapter=adapter)
    load(cell, "renamed", ONE)
    cell.serve(prompt, adapter=ONE)

    assert [order.cached_tokens for order in cell.admitted] == [0, 0, 0, 8, 8, 8, 8]


def test_requests_under_way_outlive_the_name(make_cell: MakeCell) -> None:
    """What runs and waits when an adapter is unloaded ends as it would; then workers forget it, and not before."""
    cell = make_cell(max_running=1)
    load(cell, "tuned", ONE)
    cell.drain()
    asked = [cell.submit([number, 2, 3, 4, 5], max_tokens=6, adapter=ONE) for number in range(3)]
    for _ in range(3):
        cell.round()

    cell.feed(UnloadAdapter(name="tuned"))

    assert told(cell) == []
    assert orders_of(cell, DetachAdapter) == []
    refused = cell.submit([9, 2, 3], adapter=ONE)
    assert refused not in cell.state.requests
    assert failures(cell) == [("model_not_found", "the adapter that was asked for is not served any more")]
    cell.drain()
    assert all(cell.gateway("gateway").tokens[name] for name in asked)
    assert [order.digest for order in orders_of(cell, DetachAdapter)] == [ONE]
    assert cell.state.adapters == {}


def test_a_name_that_is_given_anew_leads_to_the_other_adapter(make_cell: MakeCell) -> None:
    """An adapter that is replaced goes when nothing runs with it; its successor is loaded beside it."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()
    cell.submit([1, 2, 3, 4, 5], max_tokens=8, adapter=ONE)
    cell.round()

    load(cell, "tuned", TWO)

    assert [(each.name, each.digest) for each in told(cell)] == [("tuned", TWO)]
    assert list(cell.state.adapters) == [ONE, TWO]
    cell.drain()
    assert list(cell.state.adapters) == [TWO]
    assert list(cell.workers["worker-0"].adapters) == [TWO]


def test_a_name_moves_when_every_worker_has_the_other_adapter(make_cell: MakeCell) -> None:
    """Until then requests for the name are served as before. A worker that leaves is not waited for."""
    cell = make_cell(workers=3)
    load(cell, "tuned", ONE)
    cell.drain()
    replace(cell, "tuned", TWO)
    for name in ("worker-0", "worker-1"):
        assert named(cell) == [("tuned", ONE)]
        cell.submit([1, 2, 3, 4, 5], adapter=ONE)
        worker = cell.workers[name]
        while worker.step():
            pass
        while cell.deliver(worker):
            pass

    cell.lose_worker("worker-2")

    assert named(cell) == [("tuned", TWO)]
    cell.drain()
    assert failures(cell) == []


def test_a_replacement_that_a_worker_cannot_load_changes_nothing(make_cell: MakeCell) -> None:
    """The earlier adapter was never given up, so its files need not be there any more; the fault is told."""
    cell = make_cell(workers=2)
    load(cell, "tuned", ONE)
    cell.drain()

    replace(cell, "tuned", TWO, "bad folder")
    cell.drain()

    assert named(cell) == [("tuned", ONE)]
    assert ONE not in [order.digest for order in orders_of(cell, DetachAdapter)]
    assert list(cell.state.adapters) == [ONE]
    (adapter,) = told(cell)
    assert adapter.workers == ("worker-0", "worker-1")
    assert adapter.replacement is not None
    assert (adapter.replacement.digest, adapter.replacement.faults) == (TWO, {"worker-0": "no such adapter"})
    assert decode_state(encode_state(cell.state)).replacements == cell.state.replacements
    cell.feed(UnloadAdapter(name="tuned", digest=TWO))
    assert told(cell)[0].replacement is None


def test_a_displaced_adapter_is_served_for_a_while(make_cell: MakeCell) -> None:
    """A gateway may not know yet that the name was given away; requests that come later are refused."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()
    replace(cell, "tuned", TWO)
    cell.drain()
    late = cell.serve([1, 2, 3], adapter=ONE)
    assert len(cell.gateway("gateway").tokens[late]) == 4
    assert orders_of(cell, DetachAdapter) == []

    cell.fire(timer_of(cell, "adapter."))

    assert [order.digest for order in orders_of(cell, DetachAdapter)] == [ONE]
    cell.serve([1, 2, 3], adapter=ONE)
    assert [code for code, _ in failures(cell)] == ["model_not_found"]


@pytest.mark.parametrize("name", ["tuned", "other"])
def test_an_unload_ends_the_while(make_cell: MakeCell, name: str) -> None:
    """Nothing that the name has had is served any more; what another name has had still is."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    load(cell, "other", THREE)
    cell.drain()
    replace(cell, "tuned", TWO)
    cell.drain()

    cell.feed(UnloadAdapter(name=name))

    assert (ONE in cell.state.adapters) == (name == "other")
    assert bool(cell.timers) == (name == "other")
    cell.drain()


def test_an_adapter_that_gets_its_name_back_keeps_it(make_cell: MakeCell) -> None:
    """The end of the while for which it was displaced means nothing then."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()
    replace(cell, "tuned", TWO)
    cell.drain()

    replace(cell, "tuned", ONE, expects=TWO)
    cell.drain()

    assert named(cell) == [("tuned", ONE)]
    assert [cell.state.timers[name].subject for name in cell.timers] == [TWO]


def test_an_order_names_what_it_expects(make_cell: MakeCell) -> None:
    """Of two orders for a free name, or for one adapter in its place, the first is carried out and the other not."""
    cell = make_cell()
    replace(cell, "tuned", ONE, expects="")
    replace(cell, "tuned", TWO, expects="")
    cell.drain()
    assert named(cell) == [("tuned", ONE)]
    replace(cell, "tuned", TWO)
    cell.drain()

    replace(cell, "tuned", THREE)
    cell.drain()

    assert named(cell) == [("tuned", TWO)]
    assert cell.state.counters["adapters_refused"] == 2
    replace(cell, "tuned", TWO)  # It is there already.
    assert cell.state.counters["adapters_refused"] == 2


def test_of_two_replacements_the_later_one_counts(make_cell: MakeCell) -> None:
    """The earlier one is dropped before it had the name."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()
    replace(cell, "tuned", TWO)

    replace(cell, "tuned", THREE)

    assert [order.digest for order in orders_of(cell, DetachAdapter)] == [TWO]
    cell.drain()
    assert named(cell) == [("tuned", THREE)]


@pytest.mark.parametrize("order", [UnloadAdapter(name="tuned"), LoadAdapter(name="tuned", path="folder", digest=THREE)])
def test_an_order_for_the_name_ends_its_replacement(make_cell: MakeCell, order: UnloadAdapter | LoadAdapter) -> None:
    """An order of an earlier gateway, which expects nothing, takes effect at once."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()
    replace(cell, "tuned", TWO)

    cell.feed(order)
    cell.drain()

    assert list(cell.state.adapters) == ([] if isinstance(order, UnloadAdapter) else [THREE])
    assert cell.state.replacements == {}


def test_an_unload_may_name_the_adapter(make_cell: MakeCell) -> None:
    """Another that has the name by now keeps it."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.feed(UnloadAdapter(name="tuned", digest=TWO))
    assert named(cell) == [("tuned", ONE)]

    cell.feed(UnloadAdapter(name="tuned", digest=ONE))

    assert named(cell) == []


def test_a_full_worker_has_room_for_a_replacement(make_cell: MakeCell) -> None:
    """The replaced adapter does not count, since it leaves; one more is refused."""
    cell = make_cell()
    cell.most_adapters = 1
    load(cell, "tuned", ONE)
    cell.drain()
    replace(cell, "tuned", TWO)
    cell.drain()
    assert named(cell) == [("tuned", TWO)]
    cell.fire(timer_of(cell, "adapter."))

    load(cell, "other", THREE)
    cell.drain()

    assert told(cell)[1].faults == {"worker-0": "no room"}


def test_an_adapter_waits_for_room_that_an_unloaded_one_takes(make_cell: MakeCell) -> None:
    """It is loaded when the last request with the other has ended, and its own requests wait until then."""
    cell = make_cell()
    cell.most_adapters = 1
    load(cell, "tuned", ONE)
    cell.drain()
    cell.submit([1, 2, 3, 4, 5], max_tokens=8, adapter=ONE)
    cell.round()
    cell.feed(UnloadAdapter(name="tuned"))
    load(cell, "other", TWO)
    request = cell.submit([1, 2, 3], adapter=TWO)
    worker = cell.workers["worker-0"]
    worker.step()
    while cell.deliver(worker):
        pass
    (adapter,) = told(cell)
    assert adapter.faults == {}
    assert adapter.room_waits == {"worker-0": "no room, and an unloaded adapter still has 1 requests"}

    cell.drain()

    assert failures(cell) == []
    assert len(cell.gateway("gateway").tokens[request]) == 4
    assert told(cell)[0].workers == ("worker-0",)


def test_requests_fail_where_no_worker_can_load(make_cell: MakeCell) -> None:
    """They are told why, those that waited and those that come; a new order tries again."""
    cell = make_cell()
    load(cell, "tuned", ONE, "bad folder")
    cell.serve([1, 2, 3], adapter=ONE)
    cell.submit([1, 2, 3], adapter=ONE)
    expected = ("service_unavailable", "no worker could load the adapter: no such adapter")
    assert failures(cell) == [expected, expected]

    load(cell, "tuned", ONE, "folder")
    request = cell.serve([1, 2, 3], adapter=ONE)

    assert len(cell.gateway("gateway").tokens[request]) == 4


def test_an_answer_to_an_earlier_order_counts_for_nothing(make_cell: MakeCell) -> None:
    """An adapter that was unloaded and loaded again is there when the second order is answered."""
    cell = make_cell()
    worker = cell.workers["worker-0"]
    load(cell, "tuned", ONE)
    first = worker.inbox[0].order
    assert isinstance(first, AttachAdapter)
    cell.feed(UnloadAdapter(name="tuned"))
    load(cell, "tuned", ONE)

    cell.feed(
        AdapterAttached(worker_id="worker-0", incarnation=worker.incarnation, attach_id=first.attach_id, digest=ONE)
    )

    assert told(cell)[0].workers == ()
    assert cell.state.counters["stale_inputs"] == 1
    cell.drain()
    assert told(cell)[0].workers == ("worker-0",)


def test_a_lost_worker_takes_nothing_of_an_adapter_along(make_cell: MakeCell) -> None:
    """Its requests go on at another that has the adapter, and wait where none has."""
    cell = make_cell(workers=2)
    load(cell, "tuned", ONE)
    cell.drain()
    names = [cell.submit([number, 2, 3, 4, 5], max_tokens=8, adapter=ONE) for number in range(4)]
    for _ in range(3):
        cell.round()
    cell.lose_worker("worker-0")
    for _ in range(2):
        cell.round()
    cell.lose_worker("worker-1")

    cell.add_worker("worker-2")
    cell.drain()

    assert all(len(cell.gateway("gateway").tokens[name]) == 8 for name in names)


def test_snapshots_keep_adapters(make_cell: MakeCell) -> None:
    """A fold that goes on from a snapshot knows names, workers and requests."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()
    cell.submit([1, 2, 3, 4, 5], adapter=ONE)

    kept = decode_state(encode_state(cell.state))

    assert msgspec.to_builtins(kept.adapters) == msgspec.to_builtins(cell.state.adapters)
    assert kept.adapters[ONE].requests == 1
    assert kept.workers["worker-0"].adapters[ONE].is_loaded


@pytest.mark.parametrize(
    "message",
    [
        LoadAdapter(name="", path="folder", digest=ONE),
        LoadAdapter(name="a b", path="folder", digest=ONE),
        LoadAdapter(name="tuned", path="", digest=ONE),
        LoadAdapter(name="tuned", path="folder", digest="short"),
    ],
)
def test_senseless_orders_are_counted(make_cell: MakeCell, message: LoadAdapter) -> None:
    """They change nothing."""
    cell = make_cell()

    cell.feed(message)

    assert cell.state.adapters == {}
    assert cell.state.counters["malformed_inputs"] == 1


def test_names_are_bounded(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is refused; a name that is there may still be given anew."""
    monkeypatch.setattr("services.scheduler.core.adapters.MOST_ADAPTERS", 1)
    cell = make_cell()
    load(cell, "one", ONE)

    load(cell, "two", TWO)
    load(cell, "one", TWO)

    assert [(each.name, each.digest) for each in told(cell)] == [("one", TWO)]
    assert cell.state.counters["adapters_refused"] == 1


def test_lossy_prefixes_are_refused(make_cell: MakeCell) -> None:
    """What is read of a prefix in part is chosen with the base model's queries."""
    cell = make_cell()
    load(cell, "tuned", ONE)
    cell.drain()

    cell.submit([1, 2, 3], adapter=ONE, importance=Importance(ratio=0.5))

    assert failures(cell) == [("invalid_request", "prefixes of an adapter are read whole: fidelity must be exact")]


def test_an_unknown_name_may_be_unloaded(make_cell: MakeCell) -> None:
    """It is fine, and so is a second time."""
    cell = make_cell()

    cell.feed(UnloadAdapter(name="nobody"))

    assert "adapters_unloaded" not in cell.state.counters
