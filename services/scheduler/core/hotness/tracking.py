"""Where the fold tells the hotness filter what happens to nodes."""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.core.prefix_tree import Node
from services.scheduler.core.state import CellState
from services.scheduler.core.turn import Turn


def request_admitted(turn: Turn, reused: Sequence[Node]) -> None:
    """A request was admitted that reuses these nodes, top first, maybe none: their prefixes got hotter."""


def node_inserted(turn: Turn, node: Node) -> None:
    """Computed KV became a node. A prefix that comes back after its eviction is still known."""


def node_split(state: CellState, upper: Node, lower: Node) -> None:
    """A node was cut in two; the upper part is as hot as the whole was."""
