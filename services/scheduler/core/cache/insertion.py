"""Computed pages become cached: the tree takes over pages that a request owned.

Nodes get the importance that was measured for chunks that were read in part (see :mod:`shares`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.hotness.tracking import node_inserted, node_recomputed
from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.labels import child_of
from services.scheduler.core.cache.prefix_match import common_pages
from services.scheduler.core.cache.prefix_tree import (
    PAGE_NUMBER_BYTES,
    Node,
    add_child,
    ancestors,
    page_count,
    root_of,
)
from services.scheduler.core.cache.prompt_blocks import note_blocks
from services.scheduler.core.cache.residency import give_device, lock_path, offer, split_node, touch, unlock_path
from services.scheduler.core.cache.shares import NEUTRAL
from services.scheduler.core.kept_texts import note_behind
from shared import prompt_chain
from shared.ids import DIGEST_BYTES, TOKEN_BYTES
from shared.prompt_chain import block_digests

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node, Path
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step


def publish_computed(step: Step, request: Request, worker: Worker) -> None:
    """Let others share the full pages that a running request has computed. Changes tree and request.

    It stops where the tree already has (or is loading) the same tokens on this device: a page table cannot be
    exchanged under a running request, and holding both copies locked could keep a lone request from finishing.
    """
    if not _may_share(request):
        return
    state = step.state
    end = request.computed // state.tree.page_size
    if request.shared >= end:
        return
    node = start = _parent_of_private(state, request)
    tokens = request.tokens
    while request.shared < end:
        child = _adopt(step, request, worker, node, tokens, request.shared, end)
        if child is None:
            break
        node = child
        request.shared += page_count(state.tree, child)
    if node is not start:
        lock_path(state, node, worker, below=state.tree.nodes[request.node] if request.node else None)
        request.node = node.id
        _note_prompt(state, request, node)


def publish_final(step: Step, request: Request, worker: Worker, tokens: bytes, valid_tokens: int) -> Node | None:
    """Hand the full pages of a request that leaves its worker to the tree, and free its other pages.

    KV of the first ``valid_tokens`` of ``tokens`` is in its pages. The request holds no lock afterwards. Returns the
    node in which the handed-over pages end; None where the tree has none of them.
    """
    state = step.state
    end = valid_tokens // state.tree.page_size
    duplicates: list[bytes] = []
    position = request.shared
    last = state.tree.nodes[request.node] if request.node else None
    if _may_share(request) and (position < end or request.node):
        node = _parent_of_private(state, request)
        while position < end:
            child = _adopt(step, request, worker, node, tokens, position, end)
            if child is not None:
                size = page_count(state.tree, child)
            else:
                child, size = _cached_child(state, worker, node, tokens, position, end)
                if child is None:
                    break
                duplicates.append(request.pages[position * PAGE_NUMBER_BYTES : (position + size) * PAGE_NUMBER_BYTES])
                if size == page_count(state.tree, child):
                    node_recomputed(step, child)
                touch(state, child, step.seq)
            node = last = child
            position += size
        _note_all(state, request, worker, tokens, node, position * state.tree.page_size)
    request.pages = request.pages[: request.shared * PAGE_NUMBER_BYTES] + request.pages[position * PAGE_NUMBER_BYTES :]
    worker.pool.release(b"".join(duplicates) + request.own_pages)
    if request.node:
        deepest = state.tree.nodes[request.node]
        for used in ancestors(state.tree, deepest):
            used.last_use = step.seq
        unlock_path(state, deepest, worker)
    request.pages, request.shared, request.node = b"", 0, 0
    request.planned = request.computed = 0
    return last


def _note_prompt(state: CellState, request: Request, node: Node) -> None:
    """Let gateways refer to the prompt's blocks on the way to ``node``, where the request's shared pages end."""
    blocks, published = request.match.blocks, request.shared * state.tree.page_size
    digests = blocks.digests[blocks.noted * DIGEST_BYTES :]
    if digests:
        blocks.noted += note_blocks(state.blocks, state.tree, digests, blocks.above + blocks.noted, node, published)


def _note_all(state: CellState, request: Request, worker: Worker, tokens: bytes, node: Node, published: int) -> None:
    """Let gateways refer to the blocks of prompt and answer in the first ``published`` tokens, down to ``node``."""
    digests, above = request.match.blocks.digests, request.match.blocks.above
    end = (above + len(digests) // DIGEST_BYTES) * prompt_chain.BLOCK_TOKENS
    if published >= end + prompt_chain.BLOCK_TOKENS:
        rest = tokens[end * TOKEN_BYTES : published * TOKEN_BYTES]
        behind = block_digests(request.submit.namespace, rest, above=digests[-DIGEST_BYTES:])
        note_behind(worker.texts, digests[-DIGEST_BYTES:], behind)
        digests += behind
    if digests:
        note_blocks(state.blocks, state.tree, digests, above, node, published)


def _may_share(request: Request) -> bool:
    """Return whether others may use what a request computes: neither KV that may be wrong nor lossy KV."""
    return request.submit.cache.write and not request.is_poisoned and request.sparse.span is None


def _parent_of_private(state: CellState, request: Request) -> Node:
    """Return the node below which the request's first private page belongs."""
    if request.node:
        return state.tree.nodes[request.node]
    return root_of(state.tree, request.submit.namespace)


def _adopt(
    step: Step, request: Request, worker: Worker, parent: Node, tokens: bytes, position: int, end: int
) -> Node | None:
    """Give the tree the request's pages from ``position`` on, as many as one node takes.

    Returns the node that took them, or None when this device has (or is loading) those tokens already. The
    parent must be on this device or be a root.
    """
    state = step.state
    page = state.tree.page_token_bytes
    child = child_of(state.tree, parent, tokens, position * page)
    if child is None:
        child = add_child(state.tree, parent, tokens[position * page : end * page])
        size = end - position
        node_inserted(step, child)
        storage = state.storage_of(worker)
        if storage is not None and storage.sparse.shares.by_name:
            value_node(state, storage, child)
    else:
        if worker.worker_id in child.device or worker.worker_id in child.loading:
            return None
        size = common_pages(state.tree, child, tokens, position * page, end * page)
        if size < page_count(state.tree, child):
            child = split_node(state, child, size)
        node_recomputed(step, child)
    child.last_use = step.seq
    pages = request.pages[position * PAGE_NUMBER_BYTES : (position + size) * PAGE_NUMBER_BYTES]
    give_device(state, child, worker, pages, request.admission)
    return child


def _cached_child(
    state: CellState, worker: Worker, parent: Node, tokens: bytes, position: int, end: int
) -> tuple[Node | None, int]:
    """Return the child on this device that has the same tokens, and the number of its equal pages; None while it loads.

    Where the tokens go on differently after a part of the child, it is split there.
    """
    page = state.tree.page_token_bytes
    child = child_of(state.tree, parent, tokens, position * page)
    if child is None or worker.worker_id not in child.device:
        return None, 0
    size = common_pages(state.tree, child, tokens, position * page, end * page)
    if position + size < end and size < page_count(state.tree, child):
        child = split_node(state, child, size)
    return child, size


def value_node(state: CellState, storage: Storage | None, node: Node) -> None:
    """Give a node, new or not, the importance that was measured for its chunks at this storage, if any."""
    if storage is None or not storage.sparse.shares.by_name or not state.config.importance_caching:
        return
    page_identities(state.tree, node)
    node.set_rare(importance=storage.sparse.shares.importance_of(node.chunks_ending(state.tree.page_size)))


def value_path(state: CellState, storage: Storage, path: Path, start: int) -> None:
    """Set the importance of a path's nodes from ``start`` tokens on, and offer them to eviction again."""
    for node, _ in path:
        if node.depth >= start:
            value_node(state, storage, node)
            offer(state, node)


def forget_importance(state: CellState) -> None:
    """Make all nodes equally important again, after the setting was switched off."""
    for node in state.tree.nodes.values():
        if node.importance != NEUTRAL:
            node.set_rare(importance=NEUTRAL)
            offer(state, node)
