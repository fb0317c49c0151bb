"""Snapshots."""

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.scheduler.core import Stamped, check_invariants, decode_state, encode_state, new_state, step
from services.scheduler.core.cache.eviction import POLICIES, Policy
from services.scheduler.core.cache.eviction.policy import Moment
from services.scheduler.core.cache.holdings import EMPTY_MAP
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.state import CellState
from shared import codec
from shared.errors import CodecError
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.fixture(scope="module")
def busy_log() -> list[Stamped]:
    """The inputs of a cell under pressure, with losses on the way."""
    chance = random.Random(7)
    config = CellConfig(max_batch_tokens=24, lease_tokens=4, reserve_fraction=0.1, max_running=4)
    cell = CellModel(config, page_size=4)
    cell.add_storage("storage", pages=40)
    for number in range(2):
        cell.add_worker(f"worker-{number}", pages=24)
    for number in range(60):
        shape = [chance.randrange(3) for _ in range(chance.randrange(1, 6))]
        cell.submit([kind * 10 + place for kind in shape for place in range(4)] + [7], max_tokens=12, seed=number)
        for _ in range(chance.randrange(4)):
            cell.round()
        if number == 30:
            cell.lose_worker("worker-1")
            cell.add_worker("worker-1", pages=24)
        if number == 40:
            cell.lose_storage("storage")
            cell.add_storage("storage", pages=40)
    cell.drain()
    assert cell.state.counters["loads_started"] > 0
    assert cell.state.counters["evicted_pages_host"] > 0
    return cell.log


def fold(state: CellState, log: list[Stamped]) -> list[bytes | str]:
    """Outputs as bytes."""
    outputs = [output for stamped in log for output in step(state, stamped)]
    return [codec.encode(output) if isinstance(output, msgspec.Struct) else repr(output) for output in outputs]


def test_a_fold_that_goes_on_from_a_snapshot_says_the_same(busy_log: list[Stamped]) -> None:
    """At any cut, outputs and final state are equal to the byte."""
    whole = new_state()
    fold(whole, busy_log)
    end = encode_state(whole)

    state = new_state()
    for cut in range(0, len(busy_log), 97):
        fold(state, busy_log[max(0, cut - 97) : cut])
        restored = decode_state(encode_state(state))
        expected = fold(decode_state(encode_state(restored)), busy_log[cut:])
        assert fold(restored, busy_log[cut:]) == expected
        assert encode_state(restored) == end


def test_restoring_at_every_step_changes_nothing(busy_log: list[Stamped]) -> None:
    """Nothing that a snapshot leaves out influences a decision."""
    plain, restored = new_state(), new_state()
    for stamped in busy_log[:600]:
        expected = fold(plain, [stamped])
        restored = decode_state(encode_state(restored))
        assert fold(restored, [stamped]) == expected


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x82\xa7version\x63\xa5state\x80"])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    """Bytes of another kind or version are a CodecError."""
    with pytest.raises(CodecError):
        decode_state(data)


class NewestPolicy(Policy):
    """What came last goes first; it writes itself down in a form of its own."""

    name = "newest"
    state_version = 3

    stack: list[int] = []

    def add(self, node: Node, moment: Moment) -> None:
        self.stack.append(node.id)

    def remove(self, node: Node, moment: Moment) -> None:
        self.stack.remove(node.id)

    def split(self, upper: Any, lower: Any) -> None:
        self.stack.insert(self.stack.index(lower.id), upper.id)

    def victim(self, evictable: Callable[..., Any], moment: Moment) -> Node | None:
        return next(filter(None, map(evictable, reversed(self.stack))), None)

    def encode(self) -> bytes:
        return f"{self.capacity}:{self.stack}".encode()

    @classmethod
    def decode(cls, data: bytes) -> "NewestPolicy":
        capacity, _, stack = data.decode().partition(":")
        return cls(int(capacity), json.loads(stack))


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch, make_cell: MakeCell) -> CellState:
    """The state of a cell that evicts by a policy from outside."""
    monkeypatch.setitem(POLICIES, "newest", NewestPolicy)
    cell = make_cell(policy="newest", pages=12, host_pages=8)
    for number in range(12):
        cell.serve([number % 5 + 1] * 9)
    assert cell.state.counters["evicted_pages_device"] > 0
    return cell.state


def test_a_policy_writes_its_own_state(newest: CellState) -> None:
    """Its bytes are in the snapshot beside its name and their version, and the policy reads them."""
    data = encode_state(newest)

    order = newest.orders["device/worker-0"]
    assert isinstance(order, NewestPolicy)
    assert order.stack
    assert msgspec.msgpack.decode(data)["orders"]["device/worker-0"] == ["newest", 3, order.encode()]
    assert decode_state(data).orders == newest.orders
    assert encode_state(decode_state(data)) == data


def test_a_policy_that_is_not_registered_is_named(newest: CellState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has written something or is only to be used by the pools to come."""
    whole = encode_state(newest)
    newest.orders.clear()
    bare = encode_state(newest)
    monkeypatch.delitem(POLICIES, "newest")

    for data in (whole, bare):
        with pytest.raises(CodecError, match="names policy 'newest', which is not registered"):
            decode_state(data)


def test_a_schedule_that_is_not_registered_is_named(newest: CellState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold without it would end at its first batch."""
    data = encode_state(newest)
    monkeypatch.delitem(SCHEDULES, "balanced")

    with pytest.raises(CodecError, match="names schedule 'balanced', which is not registered"):
        decode_state(data)


def test_a_policys_state_of_another_version_begins_anew(newest: CellState, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached stays: every pool's policy knows each node that it held, and its bytes are not read."""
    data = encode_state(newest)
    monkeypatch.setattr(NewestPolicy, "state_version", 4)
    monkeypatch.setattr(NewestPolicy, "decode", None)

    state = decode_state(data)

    check_invariants(state)
    assert state.orders.keys() == newest.orders.keys()
    for pool, order in newest.orders.items():
        renewed = state.orders[pool]
        assert isinstance(renewed, NewestPolicy)
        assert isinstance(order, NewestPolicy)
        assert sorted(renewed.stack) == sorted(order.stack)
    state.orders.clear()
    newest.orders.clear()
    assert encode_state(state) == encode_state(newest)


def test_a_decoded_tree_shares_what_a_grown_one_shares(busy_log: list[Stamped]) -> None:
    """Empty dictionaries, ids and ranks take no memory of their own after a snapshot either."""
    state = new_state()
    state.tree.next_id = 1000  # The interpreter shares small numbers by itself.
    fold(state, busy_log[: len(busy_log) // 2])

    restored = decode_state(encode_state(state))

    nodes = restored.tree.nodes
    assert len(nodes) > 3
    for node_id, node in nodes.items():
        maps = (node.locks, node.host_locks, node.below)
        assert all(held or held is EMPTY_MAP for held in maps)
        assert node.id is node_id
        assert not node.parent or node.parent is nodes[node.parent].id
        assert all(child is nodes[child].id for child in node.child_ids)
    assert encode_state(restored) == encode_state(state)
