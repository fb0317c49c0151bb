"""States of the version before, in which nodes had dictionaries."""

from typing import Any

import msgspec
import pytest

from services.scheduler.core import check_invariants, decode_state, encode_state
from services.scheduler.core.cache import labels
from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.fold.snapshot import EARLIER_VERSION
from shared.errors import CodecError
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.fixture
def cell(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> CellModel:
    """Nodes with no child, one, and two, on a device and in host memory.

    Labels are narrow, but for one with a token that takes four bytes.
    """
    monkeypatch.setattr(labels, "LEAST_NARROWED", 1)
    cell = make_cell(pages=24, host_pages=64)
    for tokens in ([1] * 40, [1] * 20 + [2] * 20, [3] * 40, [1] * 40 + [2**24] * 20):
        cell.serve(tokens, max_tokens=1)
    return cell


def as_earlier(cell: CellModel) -> dict[str, Any]:
    """The state as version 12 would have told it; children had other keys, whose values are of no matter here."""
    told: dict[str, Any] = msgspec.msgpack.decode(encode_state(cell.state))
    told["version"] = EARLIER_VERSION
    del told["coming"], told["token_bytes"], told["state"]["renewal"]
    for node_id, plain in told["state"]["tree"]["nodes"].items():
        node = cell.state.tree.nodes[node_id]
        plain["t"] = node.tokens
        if "v" in plain:
            plain["v"].pop("w", None)
        plain.pop("a", None)
        reads = {"d": node.device_pages, "l": node.loading_pages, "h": node.host_pages}
        for tier, read in reads.items():
            if tier in plain:
                plain[tier] = {name: read(name) for name in plain[tier]}
        plain |= {"s": node.digest, "z": node.end_digest} | plain.pop("v", {})
        if node.children:
            plain["c"] = {2**63 + each: each for each in node.child_ids}
    return told


def test_a_state_of_the_version_before_is_whole_again(cell: CellModel) -> None:
    """Pages of every tier and children are where they were, and so is what few nodes have."""
    nodes = cell.state.tree.nodes.values()
    for number, node in enumerate(nodes):
        page_identities(cell.state.tree, node)
        node.set_rare(importance=1.0 + number % 2)
    assert any(node.host for node in nodes)
    assert any(node.device for node in nodes)
    assert {len(node.child_ids) for node in nodes} >= {0, 1, 2}

    state = decode_state(msgspec.msgpack.encode(as_earlier(cell)))

    check_invariants(state)
    assert encode_state(state) == encode_state(cell.state)


def test_tokens_of_four_bytes_become_narrow(cell: CellModel) -> None:
    """A state from before labels were narrow is as if they always had been, but for a node that needs four bytes."""
    told = msgspec.msgpack.decode(encode_state(cell.state))
    del told["token_bytes"]
    for node_id, plain in told["state"]["tree"]["nodes"].items():
        plain["t"] = cell.state.tree.nodes[node_id].tokens
        plain.get("v", {}).pop("w", None)

    state = decode_state(msgspec.msgpack.encode(told))

    check_invariants(state)
    assert encode_state(state) == encode_state(cell.state)
    assert {node.rare.is_wide for node in state.tree.nodes.values()} == {False, True}


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("state"),
        lambda told: told["state"].update(tree=[]),
        lambda told: told["state"]["tree"]["nodes"].update({1: 5}),
        lambda told: told["state"]["tree"]["nodes"].update({1: {"d": [1]}}),
        lambda told: told["state"]["tree"]["nodes"].update({1: {"h": {"storage": 7}}}),
        lambda told: told["state"]["tree"]["nodes"].update({1: {"c": 7}}),
        lambda told: told["state"]["tree"]["nodes"].update({1: {"s": "seven"}}),
        lambda told: told["state"]["tree"]["nodes"].update({1: {"c": {7: 7, 8: 8}}}),
        lambda told: told["state"]["tree"]["nodes"][1].update({"t": b"12345"}),
    ],
)
def test_nodes_of_no_version_are_refused(cell: CellModel, change: Any) -> None:
    """By the error for what is no snapshot, as with any other bytes."""
    told = as_earlier(cell)
    change(told)

    with pytest.raises(CodecError):
        decode_state(msgspec.msgpack.encode(told))
