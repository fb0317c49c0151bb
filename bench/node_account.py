"""What the bytes of a node are: the objects of a scheduler's state by kind, each counted once.

An object counts as what the allocator takes for it: up to 512 bytes a multiple of 16 (pymalloc), beyond that eight
bytes more, rounded up (glibc). What resident memory grew by beyond their sum is "the rest": parts of arenas and of the
heap that are free, arrays and dictionaries that were larger while they grew, and the interpreter's own tables.

``python -m bench.node_account [--nodes 1000000]`` prints the account of a tree, in bytes a node.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

import services.scheduler.policies  # noqa: F401  The default policy is one of them.
from bench import core_steps
from bench.million_nodes import million_nodes, resident_bytes
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import host_pool
from services.scheduler.heap import trim_heap

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState

_SMALL, _GRAIN, _HEADER = 512, 16, 8


def taken(value: object) -> int:
    """Bytes that the allocator takes for an object, without what it refers to."""
    size = sys.getsizeof(value)
    return -(-(size if size <= _SMALL else size + _HEADER) // _GRAIN) * _GRAIN


class Account:
    """Bytes by kind."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._seen: set[int] = set()

    def add(self, kind: str, *values: object) -> None:
        """Count these objects and what they refer to, unless they were counted before; nodes are left out."""
        left: list[Any] = list(values)
        total = 0
        while left:
            value = left.pop()
            if id(value) in self._seen or isinstance(value, Node):
                continue
            self._seen.add(id(value))
            total += taken(value)
            if isinstance(value, msgspec.Struct):
                left += [getattr(value, name) for name in value.__struct_fields__]
            elif isinstance(value, Mapping):
                left += value.keys()
                left += value.values()
            elif isinstance(value, list | tuple):
                left += value
        self.bytes[kind] = self.bytes.get(kind, 0) + total


def account(state: CellState, grown: int) -> dict[str, float]:
    """Bytes a node by kind; ``grown`` is what resident memory grew by while the state was made."""
    found = Account()
    nodes = state.tree.nodes
    structs = 0
    found.add("id", *nodes)
    for node in nodes.values():
        structs += taken(node)
        found.add("tokens", node.label)
        found.add("digests and page numbers", node.record)
        found.add("depth", node.depth)
        found.add("last use", node.last_use)
        found.add("names and counts", node.device, node.loading, node.host, node.locks, node.below, node.rare)
        found.add("children", node.children)
    found.bytes["struct"] = structs
    found.bytes["index of nodes"] = taken(nodes)
    found.add("policies", state.orders)
    found.add("hotness filter", state.hotness)
    pools = [worker.pool for worker in state.workers.values()]
    pools += [host_pool(storage) for storage in state.storages.values()]
    found.add("maps of pages", *pools)
    found.bytes["the rest"] = grown - sum(found.bytes.values())
    return {kind: round(size / len(nodes), 1) for kind, size in found.bytes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    trim_heap()
    before = resident_bytes()
    cell = million_nodes(nodes=options.nodes, seed=options.seed, config=core_steps.CONFIG)
    trim_heap()
    grown = resident_bytes() - before
    for kind, size in sorted(account(cell.state, grown).items(), key=lambda item: -item[1]):
        print(f"{size:8.1f}  {kind}")
    print(f"{grown / len(cell.state.tree.nodes):8.1f}  all")


if __name__ == "__main__":
    main()
