"""Transient nodes: spans of tokens whose KV a request is about to compute (Strata 4.3.1).

They are a radix tree of their own, beside the tree of cached prefixes and with the same token keys. In the main
tree every node is resident somewhere, and residency, locks, eviction orders and hotness all rest on that; a node
without pages would be an exception to each of them. Apart, the two need no rule in common: a transient node comes
and goes with the requests that mark it, and the KV that they compute enters the main tree as ordinary nodes.

A producer is a request that will compute more than ``defer_tokens`` of its own. It marks the whole path of its
tokens, so that one match from the root tells how much another request shares with it; the cached part of that
is subtracted where the mark is read. A mark is **in-queue** while its producer waits and **in-flight**
once the producer is admitted; it is removed as soon as the producer's prefill is reported, or the producer will
not complete it. Marks are kept by worker, because KV on one device helps no request on another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.labels import child_of
from services.scheduler.core.cache.prefix_match import common_pages, match_prefix
from services.scheduler.core.cache.prefix_tree import (
    Node,
    Path,
    PrefixTree,
    add_child,
    page_count,
    remove_leaf,
    root_of,
    split,
)

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState


class TransientTree(msgspec.Struct):
    """Nodes that carry marks, and the marks: by node, then worker, the ids of producers in order of marking."""

    tree: PrefixTree = msgspec.field(default_factory=lambda: PrefixTree(has_digests=False))
    marks: dict[int, dict[str, list[str]]] = {}


def add_span(
    transient: TransientTree, page_size: int, worker_id: str, request_id: str, namespace: str, tokens: bytes
) -> int:
    """Mark the whole pages of ``tokens`` (at least one) for a producer; return the deepest node's id."""
    tree = transient.tree
    tree.page_size = page_size
    node = root_of(tree, namespace)
    page = tree.page_token_bytes
    offset, end = 0, len(tokens) // page * page
    while offset < end:
        child = child_of(tree, node, tokens, offset)
        if child is None:
            child = add_child(tree, node, tokens[offset:end])
        else:
            size = common_pages(tree, child, tokens, offset, end)
            if size < page_count(tree, child):
                child = _split(transient, child, size)
        transient.marks.setdefault(child.id, {}).setdefault(worker_id, []).append(request_id)
        offset += page_count(tree, child) * page
        node = child
    return node.id


def remove_span(transient: TransientTree, worker_id: str, request_id: str, node_id: int) -> None:
    """Remove a producer's marks, from its deepest node upwards, and the nodes that are unmarked then."""
    tree = transient.tree
    node = tree.nodes[node_id]
    while node.parent:
        parent = tree.nodes[node.parent]
        marks = transient.marks[node.id]
        producers = marks[worker_id]
        producers.remove(request_id)
        if not producers:
            del marks[worker_id]
        if not marks:
            # A producer that marks a child marks its parent, so that nothing hangs below.
            del transient.marks[node.id]
            remove_leaf(tree, node)
        node = parent


def match(transient: TransientTree, namespace: str, tokens: bytes, max_pages: int) -> Path:
    """Return the longest marked path that ``tokens`` follow. Changes nothing."""
    if not transient.marks:
        return []
    return match_prefix(transient.tree, namespace, tokens, max_pages)


def _split(transient: TransientTree, node: Node, pages: int) -> Node:
    upper = split(transient.tree, node, pages)
    transient.marks[upper.id] = {worker_id: list(names) for worker_id, names in transient.marks[node.id].items()}
    return upper


def tokens_coming(state: CellState, request: Request) -> dict[str, int]:
    """Return, by worker, how many leading tokens of a request others there compute or are about to. Changes nothing."""
    if not state.transient.marks or not request.may_reuse:
        return {}
    page_size = state.tree.page_size
    max_pages = (request.token_count - 1) // page_size
    path = match(state.transient, request.submit.namespace, request.tokens, max_pages)
    coming: dict[str, int] = {}
    end = sum(pages for _, pages in path) * page_size
    for node, pages in reversed(path):
        for worker_id in state.transient.marks[node.id]:
            coming.setdefault(worker_id, end)
        end -= pages * page_size
    return coming
