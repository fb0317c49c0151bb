"""What is cached, node by node."""

from typing import Any, NoReturn

import pytest

from services.scheduler.core import list_cache
from services.scheduler.core.cache.prefix_tree import Node, add_child, root_of
from services.scheduler.core.fold import status
from services.scheduler.core.state import CellState, new_state
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.status import ListCache
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import prompt
from tests.unit.scheduler.core.saving_hidden import saving_cell


def test_chunks_are_listed_by_form(make_cell: MakeCell) -> None:
    """Those that end in a node, by the storage that has their KV or their hidden states."""
    cell = saving_cell(make_cell)
    cell.serve(prompt(2), max_tokens=1)
    cell.feed(CellConfigured(config=CellConfig(restoring="kv", hidden_form="0/1/0")))
    cell.serve([*prompt(2, tail=0), *range(500, 570)], max_tokens=1)

    nodes = list_cache(cell.state, ListCache()).nodes

    assert [(node.depth, node.disk, node.hidden) for node in nodes] == [
        (0, {"storage": 2}, {"storage": 2}),
        (128, {"storage": 1}, {}),
    ]


class CountedNodes(dict[int, Node]):
    """Nodes by id, and how many were asked for."""

    looked_at = 0

    def get(self, node_id: int, default: Any = None) -> Any:
        """As a dictionary does."""
        self.looked_at += 1
        return super().get(node_id, default)

    def __iter__(self) -> NoReturn:
        raise AssertionError("a page must not go through all nodes")

    items = values = keys = __iter__


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> CellState:
    """Forty nodes of two namespaces in turn, of which the sixth to the thirtieth are gone; pages look at ten ids."""
    monkeypatch.setattr(status, "MOST_IDS", 10)
    state = new_state()
    tree = state.tree
    tree.page_size = 1
    for number in range(40):
        add_child(tree, root_of(tree, "ab"[number % 2]), number.to_bytes(4, "little"))
    tree.nodes = CountedNodes((key, node) for key, node in tree.nodes.items() if not 8 <= key <= 32)
    return state


@pytest.mark.parametrize("namespace", ["", "a", "c"])
@pytest.mark.parametrize("max_nodes", [1, 4, 100])
def test_pages_bring_every_node_once_for_bounded_work(state: CellState, namespace: str, max_nodes: int) -> None:
    """In the order in which they were made, past ids that are gone; no page looks at more than it may."""
    found, after, is_over = [], 0, False
    counted = state.tree.nodes
    assert isinstance(counted, CountedNodes)
    while not is_over:
        before = counted.looked_at
        page = list_cache(state, ListCache(namespace=namespace, max_nodes=max_nodes, after=after))
        assert counted.looked_at - before <= 10
        assert len(page.nodes) <= max_nodes
        found += [node.id for node in page.nodes]
        is_over, after = not page.next_after, page.next_after

    nodes = [state.tree.nodes[key] for key in dict.keys(state.tree.nodes)]
    wanted = [node.id for node in nodes if node.parent and namespace in ("", state.tree.nodes[node.parent].namespace)]
    assert found == wanted


def test_a_place_behind_the_last_node_is_the_end(state: CellState) -> None:
    """A caller may go on after a node that was the last, or from nowhere."""
    assert list_cache(state, ListCache(after=10**9)).next_after == 0
    assert [node.id for node in list_cache(state, ListCache(after=-7, max_nodes=1)).nodes] == [2]
