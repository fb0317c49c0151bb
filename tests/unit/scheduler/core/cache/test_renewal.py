"""A change of policy is told in slices, and the policies before name the victims until it is done."""

from __future__ import annotations

import pytest

from services.scheduler.core import decode_state, encode_state
from services.scheduler.core.cache import eviction_orders
from services.scheduler.core.cache.eviction import POLICIES
from services.scheduler.core.cache.eviction_orders import renew_orders
from shared.messages.cell_events import CellConfig, CellConfigured
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell

PROMPTS = 12


@pytest.fixture(autouse=True)
def _in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step tells of three nodes."""
    monkeypatch.setattr(eviction_orders, "RENEWAL_UNITS", 3)


def filled(make_cell: MakeCell) -> CellModel:
    """A cell that evicts by LRU, with some chats on its device, some of them in host memory too."""
    cell = make_cell(policy="lru", pages=PROMPTS * 10, host_pages=200)
    for number in range(PROMPTS):
        cell.serve([number] * (36 + number), max_tokens=1)
    assert any(node.host for node in cell.state.tree.nodes.values())
    return cell


def change(cell: CellModel, policy: str) -> None:
    """Say that another policy is to be in force."""
    cell.feed(CellConfigured(config=CellConfig(policy=policy)))


def slices(cell: CellModel) -> int:
    """Let the timer come due until the change is done; returns how often."""
    count = 0
    while cell.state.renewal is not None:
        cell.fire("renew")
        count += 1
    return count


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_that_were_told_in_slices_are_as_if_told_at_once(make_cell: MakeCell, policy: str) -> None:
    """To the byte, where nothing else happened meanwhile; no step told of more than a few nodes."""
    cell = filled(make_cell)
    nodes = len(cell.state.tree.nodes)

    change(cell, policy if policy != "lru" else "fifo")
    if policy == "lru":
        slices(cell)
        change(cell, policy)
    assert cell.state.renewal is not None
    assert len(cell.state.renewal.told) <= 3
    assert slices(cell) >= nodes // 3

    once = decode_state(encode_state(cell.state))
    once.last_seq, once.now_ns = cell.state.last_seq, cell.state.now_ns
    renew_orders(once)
    assert {pool: order.name for pool, order in cell.state.orders.items()} == dict.fromkeys(once.orders, policy)
    assert {pool: order.encode() for pool, order in cell.state.orders.items()} == {
        pool: order.encode() for pool, order in once.orders.items()
    }
    assert "renew" not in cell.state.timers


def test_the_policy_before_names_victims_until_the_change_is_done(make_cell: MakeCell) -> None:
    """A prompt that needs room finds it, though the coming policy knows hardly a node."""
    cell = filled(make_cell)
    evicted = cell.state.counters["evicted_pages_device"]

    change(cell, "fifo")
    cell.submit([99] * 300, max_tokens=1)
    for _ in range(20):
        for member in (cell.workers["worker-0"], cell.storages["storage"]):
            member.step()
            while cell.deliver(member):
                pass

    assert cell.state.counters["evicted_pages_device"] > evicted
    assert cell.state.renewal is not None
    assert {order.name for order in cell.state.orders.values()} == {"lru"}
    slices(cell)
    assert {order.name for order in cell.state.orders.values()} == {"fifo"}
    cell.drain()


def test_a_restart_in_the_middle_goes_on_with_what_was_told(make_cell: MakeCell) -> None:
    """The coming policies are in the snapshot, and the change is done behind the same input."""
    cell = filled(make_cell)
    change(cell, "thermocline")
    cell.fire("renew")
    assert cell.state.renewal is not None
    told = list(cell.state.renewal.told)

    cell.state = decode_state(encode_state(cell.state))

    assert cell.state.renewal is not None
    assert list(cell.state.renewal.told) == told
    assert encode_state(decode_state(encode_state(cell.state))) == encode_state(cell.state)
    slices(cell)
    assert {order.name for order in cell.state.orders.values()} == {"thermocline"}


def test_a_change_back_begins_anew_as_well(make_cell: MakeCell) -> None:
    """What was told for the first change is let go of, and the last order counts."""
    cell = filled(make_cell)
    change(cell, "fifo")
    cell.fire("renew")

    change(cell, "sieve")

    assert cell.state.renewal is not None
    assert len(cell.state.renewal.told) <= 3
    slices(cell)
    assert {order.name for order in cell.state.orders.values()} == {"sieve"}


def test_a_small_cell_changes_in_one_step(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is set, as ever."""
    monkeypatch.undo()
    cell = filled(make_cell)

    change(cell, "fifo")

    assert cell.state.renewal is None
    assert "renew" not in cell.state.timers
    assert {order.name for order in cell.state.orders.values()} == {"fifo"}


def test_policies_out_of_force_are_let_go_of_one_at_an_input(make_cell: MakeCell) -> None:
    """They are in no snapshot, and no input lets go of more than one."""
    cell = filled(make_cell)
    count = len(cell.state.orders)
    change(cell, "fifo")
    slices(cell)
    assert {order.name for order in cell.state.retired} == {"lru"}
    assert len(cell.state.retired) == count

    for left in reversed(range(count)):
        cell.submit([1, 2, 3], max_tokens=1)
        assert len(cell.state.retired) == left
    assert decode_state(encode_state(cell.state)).retired == []
