"""Snapshots."""

import random

import pytest

from services.scheduler.core import decode_state, encode_state, new_state, step
from services.scheduler.core.cache.empty_map import EMPTY_MAP
from shared import codec
from shared.errors import CodecError
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel


@pytest.fixture(scope="module")
def busy_log():
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


def fold(state, log):
    """Outputs as bytes."""
    outputs = [output for stamped in log for output in step(state, stamped)]
    return [codec.encode(output) if hasattr(output, "__struct_fields__") else repr(output) for output in outputs]


def test_a_fold_that_goes_on_from_a_snapshot_says_the_same(busy_log):
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


def test_restoring_at_every_step_changes_nothing(busy_log):
    """Nothing that a snapshot leaves out influences a decision."""
    plain, restored = new_state(), new_state()
    for stamped in busy_log[:600]:
        expected = fold(plain, [stamped])
        restored = decode_state(encode_state(restored))
        assert fold(restored, [stamped]) == expected


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x82\xa7version\x63\xa5state\x80"])
def test_what_is_no_snapshot_is_refused(data):
    """Bytes of another kind or version are a CodecError."""
    with pytest.raises(CodecError):
        decode_state(data)


def test_a_decoded_tree_shares_what_a_grown_one_shares(busy_log):
    """Empty dictionaries, ids and ranks take no memory of their own after a snapshot either."""
    state = new_state()
    state.tree.next_id = 1000  # The interpreter shares small numbers by itself.
    fold(state, busy_log[: len(busy_log) // 2])

    restored = decode_state(encode_state(state))

    nodes = restored.tree.nodes
    assert len(nodes) > 3
    for node_id, node in nodes.items():
        maps = (node.children, node.device, node.loading, node.host, node.locks, node.host_locks, node.below)
        assert all(held or held is EMPTY_MAP for held in maps)
        assert node.id is node_id
        assert not node.parent or node.parent is nodes[node.parent].id
        assert all(child is nodes[child].id for child in node.children.values())
    assert encode_state(restored) == encode_state(state)
