"""Paths are locked and unlocked as a whole where that comes to the same as node by node."""

from __future__ import annotations

import pytest

from services.scheduler.core import CellState
from services.scheduler.core.cache import residency
from services.scheduler.core.cache.prefix_tree import Node, way_to
from services.scheduler.core.cache.residency import lock_path, unlock_path
from tests.growing_session import GrowingSession


def a_path(turns: int = 3) -> tuple[CellState, list[Node]]:
    """The nodes of a session, top first, which nothing locks."""
    session = GrowingSession(pages=2_000)
    for _ in range(turns):
        session.turn(300)
    deepest = max(session.state.tree.nodes.values(), key=lambda node: node.end)
    return session.state, way_to(session.state.tree, deepest).nodes


@pytest.mark.parametrize("has_copy", [False, True])
def test_what_another_pool_holds_too_is_offered_node_by_node(has_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what nobody else holds is kept by what lies below, so that its end alone is."""
    state, nodes = a_path()
    worker, offered = state.workers["w"], list[int]()
    if has_copy:
        nodes[0].put_in_host("s", nodes[0].device_pages("w"))
    monkeypatch.setattr(residency, "offer", lambda state, node: offered.append(node.id))

    lock_path(state, nodes[-1], worker)
    assert worker.pool.locked == nodes[-1].end // state.tree.page_size
    unlock_path(state, nodes[-1], worker)

    assert offered == ([node.id for node in reversed(nodes)] if has_copy else [nodes[-1].id])
    assert worker.pool.locked == 0
    assert not any(node.locks for node in nodes)


def test_a_part_of_a_path_that_another_request_locks_stays_locked() -> None:
    """Whichever of both ends first, and a path that both lock is locked twice."""
    state, nodes = a_path()
    worker = state.workers["w"]
    counts = []
    for locks, node in ((True, nodes[1]), (True, nodes[-1]), (True, nodes[-1]), (False, nodes[1]), (False, nodes[-1])):
        (lock_path if locks else unlock_path)(state, node, worker)
        counts.append([each.locks.get("w", 0) for each in nodes])

    behind = len(nodes) - 2
    assert counts == [
        [1, 1, *[0] * behind],
        [2, 2, *[1] * behind],
        [3, 3, *[2] * behind],
        [2, 2, *[2] * behind],
        [1, 1, *[1] * behind],
    ]
    assert worker.pool.locked == nodes[-1].end // state.tree.page_size
