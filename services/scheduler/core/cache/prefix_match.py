"""The reusable part of a request's prefix at a worker: on its own device, in its node's host pool, on other devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.cache.labels import NARROW_BYTES, child_of, narrow_behind, page_key
from services.scheduler.core.cache.prefix_tree import Node, Path, PrefixTree, page_count, way_to
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker

NARROWED_TOKENS = 4096
"""Tokens of a prompt that are narrowed first, at least; then twice as many, as each call costs much for short nodes."""
_MOST_NARROWED = 16384 * TOKEN_BYTES  # More does not fit a core's cache, and is mapped anew each time.
_NOTHING = bytearray()
_NODES, _PAGES = itemgetter(0), itemgetter(1)  # The parts of an entry of a path.

NOTHING_JOINABLE: Mapping[int, str | None] = {}


@dataclass(slots=True)
class PrefixMatch:
    """The usable part of a match, top first: nodes on the device, then nodes to load.

    ``joined`` nodes are loaded by the batch that is being formed, for another request of it (a bundle hit, Strata
    4.3.2); ``loaded`` nodes would be loaded for this one. ``sources`` has for each joined and then each loaded node the
    neighbour from whose device it comes; "" is the host pool. ``awaited`` is a node that an earlier batch or a
    promotion is loading, right below what is usable.
    """

    device: list[Node] = field(default_factory=list)
    joined: list[Node] = field(default_factory=list)
    loaded: list[Node] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    device_pages: int = 0
    joined_pages: int = 0
    loaded_pages: int = 0
    neighbour_pages: int = 0  # Those of ``joined_pages`` and ``loaded_pages`` that neighbours send.
    awaited: Node | None = None

    @property
    def pages(self) -> int:
        """Number of usable pages, on the device or to be loaded."""
        return self.device_pages + self.joined_pages + self.loaded_pages

    @property
    def loads(self) -> list[tuple[str, list[Node]]]:
        """Loads as stretches of one source each, top first: (the neighbour or "", its nodes)."""
        stretches: list[tuple[str, list[Node]]] = []
        for node, source in zip(self.loaded, self.sources[len(self.joined) :], strict=True):
            if stretches and stretches[-1][0] == source:
                stretches[-1][1].append(node)
            else:
                stretches.append((source, [node]))
        return stretches

    @property
    def nodes(self) -> list[Node]:
        """All usable nodes, top first."""
        return [*self.device, *self.joined, *self.loaded]

    @property
    def deepest_held(self) -> Node | None:
        """The deepest node that has device pages already, valid or about to be; None without any."""
        if self.joined:
            return self.joined[-1]
        return self.device[-1] if self.device else None


def find_path(state: CellState, request: Request) -> Path:
    """Return the path of this request's tokens in the tree, whatever tiers hold it. Changes nothing.

    At least the last token must be computed, for its logits; so the match ends a token before the end.
    """
    if not state.tree.page_size or not request.may_reuse:
        return []
    max_pages = (request.token_count - 1) // state.tree.page_size
    namespace, match = request.submit.namespace, request.match
    return match_again(state.tree, namespace, request.tokens, max_pages, match.node, match.tokens)


def note_path(state: CellState, request: Request, path: Path) -> None:
    """Note where a match of this request ended, so that the next continues there."""
    match = request.match
    match.node = match.tokens = 0
    if path:
        node, pages = path[-1]
        page_size = state.tree.page_size
        # Another attempt may go on with other tokens behind the prompt; the prompt itself never changes.
        match.node = node.id
        match.tokens = min(node.depth + pages * page_size, request.submit.prompt_tokens // page_size * page_size)


def matched_path(state: CellState, request: Request) -> Path:
    """Return :func:`find_path`, and note where it ends."""
    path = find_path(state, request)
    note_path(state, request, path)
    return path


def reach(
    state: CellState, path: Path, worker: Worker, joinable: Mapping[int, str | None] = NOTHING_JOINABLE
) -> PrefixMatch:
    """Return the part of ``path`` that this worker can reuse. Changes nothing.

    ``joinable`` nodes are loaded by the batch that is being formed, from the neighbour named there or from the host
    pool: requests of that batch may reuse them.
    """
    found = PrefixMatch()
    if not path:
        return found
    worker_id, storage_id = worker.worker_id, state.storage_id_of(worker)
    may_ask = state.config.neighbour_loads and bool(worker.moves.neighbours)
    held = held_on(path, worker_id)
    found.device = list(map(_NODES, path[:held]))
    found.device_pages = sum(map(_PAGES, path[:held]))
    for node, pages in path[held:]:
        if worker_id in node.loading:
            if node.id not in joinable:
                found.awaited = node
                break
            source = joinable[node.id] or ""
            found.joined.append(node)
            found.sources.append(source)
            found.joined_pages += pages
            found.neighbour_pages += pages if source else 0
        elif storage_id in node.host and storage_id not in node.quarantined:
            found.loaded.append(node)
            found.sources.append("")
            found.loaded_pages += pages
        else:
            neighbour = nearest_holder(state, worker, node) if may_ask else ""
            if not neighbour:
                break
            found.loaded.append(node)
            found.sources.append(neighbour)
            found.loaded_pages += pages
            found.neighbour_pages += pages
    if found.loaded and found.loaded_pages * state.tree.page_size < state.config.min_host_load_tokens:
        _load_nothing(found, path)
    return found


def held_on(path: Path, worker_id: str) -> int:
    """Return how many nodes of a path, from its top on, are on this worker's device. Changes nothing.

    With each node on a device all nodes above it are, so that the end is found by bisection.
    """
    low, high = 0, len(path)
    if high and worker_id in path[-1][0].device:
        return high
    while low < high:
        middle = (low + high) // 2
        if worker_id in path[middle][0].device:
            low = middle + 1
        else:
            high = middle
    return low


def _load_nothing(found: PrefixMatch, path: Path) -> None:
    """Drop the loads of a match, which are too few to be worth it."""
    start = len(found.device) + len(found.joined)
    sources = found.sources[len(found.joined) :]
    found.neighbour_pages -= sum(pages for (_, pages), source in zip(path[start:], sources, strict=False) if source)
    found.loaded, found.loaded_pages = [], 0
    del found.sources[len(found.joined) :]


def nearest_holder(state: CellState, worker: Worker, node: Node) -> str:
    """Return the neighbour to copy a node from, the first holder that joined; "" for none. Changes nothing."""
    usable = [name for name in node.device if worker.moves.neighbours.get(name)]
    if len(usable) < 2:
        return usable[0] if usable else ""
    return next(name for name in state.workers if name in usable)


def match_prefix(tree: PrefixTree, namespace: str, tokens: bytes, max_pages: int) -> Path:
    """Return the longest path of the namespace's tree that ``tokens`` follow, at most ``max_pages``.

    Changes nothing.
    """
    root = tree.roots.get(namespace)
    path: Path = []
    if root is not None:
        _descend(tree, tree.nodes[root], tokens, 0, _end_of_match(tree, tokens, max_pages), path)
    return path


def match_again(
    tree: PrefixTree, namespace: str, tokens: bytes, max_pages: int, deepest: int, matched_tokens: int
) -> Path:
    """Return the same as :func:`match_prefix`, for tokens whose last match ended in node ``deepest``. Changes nothing.

    The first ``matched_tokens`` (whole pages) of ``tokens`` are known to lie on the way from the root to that
    node's end. If it still lives they still do, so only the tokens behind them are compared.
    """
    node = tree.nodes.get(deepest)
    if node is None:
        return match_prefix(tree, namespace, tokens, max_pages)
    page_size = tree.page_size
    end = _end_of_match(tree, tokens, max_pages)
    known = min(matched_tokens, end // TOKEN_BYTES)
    path = way_to(tree, node).path.copy()
    while path and path[-1][0].depth >= known:
        node = path.pop()[0]
    if path:
        node, pages = path[-1]
        path[-1] = (node, min(pages, (known - node.depth) // page_size))
    else:
        node = way_to(tree, node).root
    if path:
        following = node.end
        if known < following:
            # It may go on within this node only if the first match ended at its cap.
            path[-1] = (node, _common_pages(tree, node, tokens, node.depth * TOKEN_BYTES, end, known - node.depth))
            if node.depth + path[-1][1] * page_size < following:
                return path
        known = following
    _descend(tree, node, tokens, known * TOKEN_BYTES, end, path)
    return path


def match_below(tree: PrefixTree, node: Node, tokens: bytes, max_pages: int) -> Path:
    """Return the part of a match below ``node``; ``tokens`` follow all of its way from the root. Changes nothing."""
    path: Path = []
    _descend(tree, node, tokens, node.end * TOKEN_BYTES, _end_of_match(tree, tokens, max_pages), path)
    return path


def _end_of_match(tree: PrefixTree, tokens: bytes, max_pages: int) -> int:
    page = tree.page_token_bytes
    return min(len(tokens) // page, max_pages) * page


def _descend(tree: PrefixTree, node: Node, tokens: bytes, offset: int, end: int, path: Path) -> None:
    """Follow ``tokens[offset:end]`` (byte offsets) down from ``node``, and append the nodes to ``path``."""
    page = tree.page_token_bytes
    nodes = tree.nodes
    # The narrowed part of the prompt ends at ``stop``; ``place`` is where ``offset`` lies in it.
    narrowed, place, stop, ahead = _NOTHING, 0, offset, NARROWED_TOKENS * TOKEN_BYTES
    while offset < end:
        children = node.children
        if isinstance(children, int):
            if not children:
                return
            child_id = children  # No hash is needed: its tokens decide.
        else:
            found = children.get(page_key(tokens[offset : offset + page]))
            if found is None:
                return
            child_id = found
        node = nodes[child_id]
        label = node.label
        if node.rare.is_wide:
            following = offset + len(label)
            if following <= end and tokens.startswith(label, offset):
                path.append((node, len(label) // page))
                offset, place = following, place + len(label) // TOKEN_BYTES * NARROW_BYTES
                continue
        else:
            following = offset + len(label) // NARROW_BYTES * TOKEN_BYTES
            if following <= end:
                if following > stop:
                    stop, place = min(end, max(following, offset + ahead)), 0
                    # Where it is None no label matches, and pages are compared.
                    narrowed = narrow_behind(tokens, offset, stop) or _NOTHING
                    ahead = min(2 * ahead, _MOST_NARROWED)
                if narrowed.startswith(label, place):
                    path.append((node, (following - offset) // page))
                    offset, place = following, place + len(label)
                    continue
        pages = _common_pages(tree, node, tokens, offset, end)
        if not pages:  # Another first page, of another hash or of the same.
            sibling = child_of(tree, nodes[node.parent], tokens, offset)
            if sibling is None:
                return
            node = sibling
            pages = _common_pages(tree, node, tokens, offset, end)
        path.append((node, pages))
        if pages < page_count(tree, node):
            return
        offset = stop = offset + pages * page


def common_pages(tree: PrefixTree, node: Node, tokens: bytes, offset: int, end: int) -> int:
    """Return how many whole pages of ``node`` equal ``tokens[offset:end]`` (byte offsets). Changes nothing."""
    if offset + node.size * TOKEN_BYTES <= end and tokens.startswith(node.tokens, offset):
        return page_count(tree, node)
    return _common_pages(tree, node, tokens, offset, end)


def _common_pages(tree: PrefixTree, node: Node, tokens: bytes, offset: int, end: int, known: int = 0) -> int:
    """Return the number of equal whole pages; the first ``known`` tokens of the node are equal."""
    page_size = tree.page_size
    length = min(node.size, (end - offset) // TOKEN_BYTES) // page_size * page_size
    if length <= known:
        return length // page_size
    ours = np.frombuffer(node.tokens_between(known, length), dtype="<i4")
    theirs = np.frombuffer(tokens, dtype="<i4", count=length - known, offset=offset + known * TOKEN_BYTES)
    differs = ours != theirs
    first = int(differs.argmax())
    return (known + first) // page_size if differs[first] else length // page_size
