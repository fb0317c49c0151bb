"""Insertion of fetched pages: the tree takes over host pages that the fetch had leased.

Nodes that exist get a host copy, cut where the fetched span begins or ends in them; where the tree ends, a node is made
for the rest. The tree may have changed since the fetch was ordered. A page whose span has a copy by now is given back,
and so is everything behind a gap: a node cannot hang under tokens that are in no pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.hotness.tracking import node_inserted
from services.scheduler.core.cache.insertion import value_node
from services.scheduler.core.cache.labels import child_of
from services.scheduler.core.cache.pins import take_hold
from services.scheduler.core.cache.prefix_match import common_pages
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, add_child, page_count, root_of
from services.scheduler.core.cache.residency import HOST, give_host, host_pool, split_node
from services.scheduler.core.tiers.under_way import NOWHERE
from shared.chunks import chunk_pages
from shared.messages.base import pack_int32, unpack_int32

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Fetch


def insert_fetched(step: Step, storage: Storage, fetch: Fetch, chunks: int) -> Node | None:
    """Insert the first ``chunks`` chunks of a fetch, which are in host memory; earlier ones are passed over.

    Return the node that the last of them ends with; None where a gap keeps them out.
    """
    each = chunk_pages(step.state.tree.page_size)
    deepest = _Insertion(step, storage, fetch, fetch.chunks * each, chunks * each).run()
    give_back(step.state, storage, fetch, fetch.chunks * each, chunks * each)
    fetch.chunks = chunks
    if step.state.pins:
        take_hold(step, storage)
    return deepest


def give_back(state: CellState, storage: Storage, fetch: Fetch, start: int, end: int) -> None:
    """Free the pages [start, end) of a fetch that it still leases, which are not written any more."""
    left = unpack_int32(fetch.pages[start * PAGE_NUMBER_BYTES : end * PAGE_NUMBER_BYTES])
    pages = [page for page in left if page != NOWHERE]
    host_pool(storage).release(pack_int32(pages))
    storage.fetching.pages -= len(pages)
    owner = state.tree.owner_of(fetch.namespace)
    if owner and pages:
        state.quotas.charge(owner, f"{HOST}/{storage.storage_id}", -len(pages))
    _strike(fetch, start, end)


def _strike(fetch: Fetch, start: int, end: int) -> None:
    """Remove pages [start, end) from the leases of the fetch."""
    nowhere = pack_int32([NOWHERE] * (end - start))
    fetch.pages = fetch.pages[: start * PAGE_NUMBER_BYTES] + nowhere + fetch.pages[end * PAGE_NUMBER_BYTES :]


class _Insertion:
    """One walk down the tree. Positions are pages from the root; those of the fetch begin with ``base``."""

    def __init__(self, step: Step, storage: Storage, fetch: Fetch, start: int, end: int) -> None:
        self._step, self._storage, self._fetch = step, storage, fetch
        self._base = fetch.depth // step.state.tree.page_size
        self._start, self._end = self._base + start, self._base + end
        self._pages = unpack_int32(fetch.pages[start * PAGE_NUMBER_BYTES : end * PAGE_NUMBER_BYTES])

    def run(self) -> Node | None:
        """Follow the fetch's tokens from the root, and give nodes the pages that have arrived."""
        state, tokens = self._step.state, self._fetch.tokens
        tree = state.tree
        page = tree.page_token_bytes
        root_id = tree.roots.get(self._fetch.namespace)
        node = None if root_id is None else tree.nodes[root_id]
        position = 0
        while position < self._end:
            child = None if node is None else child_of(tree, node, tokens, position * page)
            if child is None:
                node, size = self._add(node, position)
                if node is None:
                    return None
            else:
                size = common_pages(tree, child, tokens, position * page, self._end * page)
                node = self._fill(child, position, size)
            position += size
        return node

    def _add(self, parent: Node | None, position: int) -> tuple[Node | None, int]:
        """Add a node for the leased pages from ``position`` on; return it and its pages, or None at a gap."""
        state, fetch = self._step.state, self._fetch
        end = self._end_of_leased(position) if position >= self._start else position
        if end == position:
            return None, 0
        tree = state.tree
        page = tree.page_token_bytes
        above = root_of(tree, fetch.namespace) if parent is None else parent
        child = add_child(tree, above, fetch.tokens[position * page : end * page])
        child.last_use = self._step.seq
        node_inserted(self._step, child)
        value_node(state, self._storage, child)
        self._give(child, position, end)
        return child, end - position

    def _fill(self, node: Node, first: int, size: int) -> Node:
        """Give the node that begins at page ``first`` a copy where it has none; return the node to go on below.

        Only its first ``size`` pages are the fetch's.
        """
        state, end = self._step.state, first + size
        if not self._has_copy(node):
            position = max(first, self._start)
            while position < end:
                following = self._end_of_leased(position, end)
                if following == position:
                    position += 1
                    continue
                if position > first:
                    split_node(state, node, position - first)  # The lower part keeps the id.
                    first = position
                upper = self._cut(node, following - first)
                self._give(upper, position, following)
                if upper is node:
                    return node
                if following == end:
                    return upper
                first = position = following
        return node if end == self._end else self._cut(node, end - first)

    def _cut(self, node: Node, pages: int) -> Node:
        """Cut the first ``pages`` pages of a node into a node of their own."""
        state = self._step.state
        return node if pages == page_count(state.tree, node) else split_node(state, node, pages)

    def _has_copy(self, node: Node) -> bool:
        """Return whether the node has a copy in this pool or a backup is making one."""
        name = self._storage.storage_id
        transfers = self._step.state.transfers
        is_coming = bool(node.backup_pages) and transfers[node.transfer].storage_id == name
        return name in node.host or is_coming

    def _end_of_leased(self, position: int, most: int | None = None) -> int:
        """Return the end of the leased pages that follow one another from ``position`` on."""
        most = self._end if most is None else most
        while position < most and self._pages[position - self._start] != NOWHERE:
            position += 1
        return position

    def _give(self, node: Node, start: int, end: int) -> None:
        state: CellState = self._step.state
        pages = self._pages[start - self._start : end - self._start]
        give_host(state, node, self._storage, pack_int32(pages))
        self._storage.fetching.pages -= len(pages)
        _strike(self._fetch, start - self._base, end - self._base)
