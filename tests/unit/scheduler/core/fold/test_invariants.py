"""The checker finds what it is for."""

from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.core import check_invariants
from services.scheduler.core.state import CellState
from services.scheduler.core.waiting.transient import add_span
from shared.errors import InvariantViolated
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell with something cached in both tiers and something running."""
    cell = make_cell(pages=24, host_pages=60)
    for number in range(3):
        cell.serve([number] * 40, max_tokens=1)
    cell.submit([2] * 40 + [7], max_tokens=9, ignore_eos=True, request_id="a")
    cell.round()
    return cell


def leak_page(state: CellState) -> None:
    state.workers["worker-0"].pool.free -= 1


def forget_lock(state: CellState) -> None:
    next(node for node in state.tree.nodes.values() if node.locks).locks = {}


def share_page(state: CellState) -> None:
    nodes = [node for node in state.tree.nodes.values() if "worker-0" in node.device]
    count = len(nodes[0].take_from_device("worker-0")) // 4
    nodes[0].put_on_device("worker-0", nodes[-1].device_pages("worker-0")[:4] * count)


def orphan_node(state: Any) -> None:
    next(node for node in state.tree.nodes.values() if node.parent).parent = 999


def miscount_cached(state: CellState) -> None:
    assert state.storages["storage"].pool is not None
    state.storages["storage"].pool.cached += 1


def lose_request(state: CellState) -> None:
    state.workers["worker-0"].work.running.remove("a")


def strand_node(state: CellState) -> None:
    node = next(node for node in state.tree.nodes.values() if node.parent and not node.device)
    node.take_from_host("storage")


def invent_timer(state: CellState) -> None:
    state.tree.roots["00" * 16] = 1


def forget_tenant(state: CellState) -> None:
    state.tenants["nobody"] = 1


def lose_place_in_line(state: CellState) -> None:
    state.workers["worker-0"].line.queue.size += 1


def miscount_unplanned(state: CellState) -> None:
    state.workers["worker-0"].work.unplanned += 1


def leave_a_mark(state: CellState) -> None:
    state.requests["a"].place.marks = add_span(
        state.transient, 4, "worker-0", "a", state.requests["a"].submit.namespace, state.requests["a"].tokens
    )


def wait_for_nothing(state: CellState) -> None:
    state.waiters["a"] = {}


def wait_without_deadline(state: CellState) -> None:
    state.requests["a"].patience.timer = "deferral.1.1"


FAULTS = [
    forget_tenant,
    lose_place_in_line,
    miscount_unplanned,
    leave_a_mark,
    wait_for_nothing,
    wait_without_deadline,
    leak_page,
    forget_lock,
    share_page,
    miscount_cached,
    lose_request,
    strand_node,
    invent_timer,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(cell: CellModel, fault: Callable[..., None]) -> None:
    """A state that contradicts itself does not pass."""
    check_invariants(cell.state)

    fault(cell.state)

    with pytest.raises((InvariantViolated, KeyError)):
        check_invariants(cell.state)
