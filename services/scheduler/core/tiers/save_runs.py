"""Runs of whole chunks of a path that are still to be saved, and where their pages can be read."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import compress, pairwise
from operator import attrgetter, itemgetter, not_
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, Path, namespace_of, way_to
from services.scheduler.core.tiers.catalogue import is_hidden_kept
from services.scheduler.core.tiers.under_way import PACKED_NOWHERE
from shared.chunks import chunk_names, chunk_pages
from shared.ids import DIGEST_BYTES, chain_root

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage


_NODES, _IDENTITIES = itemgetter(0), attrgetter("rare.identities")


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive whole chunks. Lists are packed as in ``SaveChunks``; ``first`` counts chunks from the root.

    ``reads`` is the deepest node whose device pages are read, None where all are in host memory; ``node`` is the one in
    which the run ends.
    """

    first: int
    depth: int  # tokens
    names: tuple[bytes, ...]
    tokens: bytes
    parent: bytes
    identities: bytes
    host_pages: bytes
    device_pages: bytes
    reads: Node | None
    node: Node


@dataclass(frozen=True, slots=True)
class _Span:
    """Chunks of a path from number ``first`` on: names, identities of their pages, and that of the page before."""

    first: int
    names: list[bytes]
    identities: bytes
    before: bytes


@dataclass(slots=True)
class _Pages:
    """Pages of a path from some chunk on. ``ends`` is where each node's pages end, ``is_on_device`` how it is read."""

    tokens: list[bytes] = field(default_factory=list)
    host: list[bytes] = field(default_factory=list)
    device: list[bytes] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_on_device: list[bool] = field(default_factory=list)


def runs_to_save(
    state: CellState, path: Path, storage: Storage, worker_id: str, first: int, most: int
) -> list[ChunkRun]:
    """Return runs of at most ``most`` chunks of a path, from its chunk number ``first`` on, top first.

    ``path`` is as :func:`prefix_match.match_prefix` returns it. Chunks that the storage has or is about to have, as
    KV or as hidden states that it is restored from, and those with a page that is neither in its host pool nor on this
    worker, are left out. Computes the identities of nodes that have none.
    """
    per_chunk = chunk_pages(state.tree.page_size)
    identities, before = _identities_of(state, path, first * per_chunk)
    names = chunk_names(identities, per_chunk)
    missing = _missing(state, storage, names)
    if not missing:
        return []
    # A session has saved nearly all of its path before: only pages from the first missing chunk on are gathered.
    upper = missing[0]
    skipped = upper * per_chunk
    if skipped:
        before = identities[(skipped - 1) * DIGEST_BYTES : skipped * DIGEST_BYTES]
    span = _Span(first + upper, names[upper:], identities[skipped * DIGEST_BYTES :], before)
    found = _pages_of(state, path, storage.storage_id, worker_id, span.first * per_chunk)
    return _runs(state, span, found, [index - upper for index in missing], most)


def _missing(state: CellState, storage: Storage, names: list[bytes]) -> list[int]:
    """Return the indices of the chunks that the storage neither has nor is about to have."""
    held, saving, taken = storage.disk.chunks, storage.disk.saving, storage.disk.taken
    missing = list(compress(range(len(names)), map(not_, map(held.__contains__, names))))
    if storage.hidden.pool is not None and state.config.restoring != "kv":
        missing = [index for index in missing if not is_hidden_kept(storage, names[index])]
    if missing and (saving or taken):
        missing = [index for index in missing if names[index] not in saving and names[index] not in taken]
    return missing


def _runs(state: CellState, span: _Span, found: _Pages, missing: list[int], most: int) -> list[ChunkRun]:
    """Return runs of the span's missing chunks whose pages are all in host memory or on the device."""
    page_size, per_chunk = state.tree.page_size, chunk_pages(state.tree.page_size)
    host, device = b"".join(found.host), b"".join(found.device)
    at_host, at_device = (np.frombuffer(pages, dtype="<i4") for pages in (host, device))
    usable = len(span.names) * per_chunk
    is_somewhere = (at_host[:usable] >= 0) | (at_device[:usable] >= 0)
    is_there = np.logical_and.reduce(is_somewhere.reshape(-1, per_chunk), axis=1)
    wanted = [index for index in missing if is_there[index]]
    if not wanted:
        return []
    tokens, identities = b"".join(found.tokens), span.identities
    page_token_bytes = state.tree.page_token_bytes
    runs = []
    for start, end in stretches(wanted, most):
        low, high = start * per_chunk, end * per_chunk
        runs.append(
            ChunkRun(
                first=span.first + start,
                depth=(span.first * per_chunk + low) * page_size,
                names=tuple(span.names[start:end]),
                tokens=tokens[low * page_token_bytes : high * page_token_bytes],
                parent=identities[(low - 1) * DIGEST_BYTES : low * DIGEST_BYTES] if low else span.before,
                identities=identities[low * DIGEST_BYTES : high * DIGEST_BYTES],
                host_pages=host[low * PAGE_NUMBER_BYTES : high * PAGE_NUMBER_BYTES],
                device_pages=device[low * PAGE_NUMBER_BYTES : high * PAGE_NUMBER_BYTES],
                reads=_deepest_read(found, low, high),
                node=_node_at(found, high - 1),
            )
        )
    return runs


def path_to(state: CellState, node: Node) -> Path:
    """Return the path that ends with a node, as :func:`prefix_match.match_prefix` returns it.

    Does not change the state.
    """
    return way_to(state.tree, node).path.copy()


def _identities_of(state: CellState, path: Path, base: int) -> tuple[bytes, bytes]:
    """Return the identities of a path's pages from page ``base`` on, and that of the page before."""
    tree = state.tree
    if not path:
        return b"", b""
    deepest, pages = path[-1]
    page_identities(tree, deepest)  # Computes those of all nodes above, too.
    end = (deepest.depth // tree.page_size + pages) * DIGEST_BYTES
    identities = b"".join(map(_IDENTITIES, map(_NODES, path)))
    before = identities[(base - 1) * DIGEST_BYTES : base * DIGEST_BYTES]
    return identities[base * DIGEST_BYTES : end], before if base else chain_root(namespace_of(tree, deepest))


def _pages_of(state: CellState, path: Path, storage_id: str, worker_id: str, base: int) -> _Pages:
    """Return the pages of a path from page ``base`` on. Host copies go first: reading them needs no lock."""
    tree = state.tree
    found = _Pages()
    is_lost = f"host/{storage_id}" in state.lost  # Nodes may still name a pool that is gone.
    first = bisect_right(path, base * tree.page_size, key=_depth) - 1
    for node, pages in path[max(0, first) :]:
        start = node.depth // tree.page_size
        skipped = max(0, base - start)
        if pages <= skipped:
            continue
        is_readable = not is_lost and storage_id not in node.quarantined
        host = node.host_pages(storage_id) if is_readable and storage_id in node.host else b""
        device = node.device_pages(worker_id) if not host and worker_id in node.device else b""
        size = pages - skipped
        found.tokens.append(node.tokens_between(skipped * tree.page_size, pages * tree.page_size))
        found.host.append(
            host[skipped * PAGE_NUMBER_BYTES : pages * PAGE_NUMBER_BYTES] if host else PACKED_NOWHERE * size
        )
        found.device.append(
            device[skipped * PAGE_NUMBER_BYTES : pages * PAGE_NUMBER_BYTES] if device else PACKED_NOWHERE * size
        )
        found.nodes.append(node)
        found.ends.append((found.ends[-1] if found.ends else 0) + size)
        found.is_on_device.append(bool(device))
    return found


def _depth(place: tuple[Node, int]) -> int:
    return place[0].depth


def stretches(wanted: list[int], most: int) -> list[tuple[int, int]]:
    """Return ascending numbers as stretches [start, end) without a gap, of at most ``most`` each."""
    breaks = [place for place, (left, right) in enumerate(pairwise(wanted), 1) if right != left + 1]
    stretches = []
    for start, end in pairwise([0, *breaks, len(wanted)]):
        low, high = wanted[start], wanted[end - 1] + 1
        stretches += [(cut, min(cut + most, high)) for cut in range(low, high, most)]
    return stretches


def _deepest_read(found: _Pages, low: int, high: int) -> Node | None:
    """Return the deepest node with pages among [low, high) that are read from the device, or None."""
    start = 0
    deepest = None
    for node, end, is_on_device in zip(found.nodes, found.ends, found.is_on_device, strict=True):
        if is_on_device and start < high and end > low:
            deepest = node
        start = end
    return deepest


def _node_at(found: _Pages, page: int) -> Node:
    """Return the node that has this page of the found ones."""
    return next(node for node, end in zip(found.nodes, found.ends, strict=True) if page < end)


def depth_in_chunks(state: CellState, node: Node) -> int:
    """Return the number of the chunk with the node's first page, from the root. Does not change the state."""
    return node.depth // state.tree.page_size // chunk_pages(state.tree.page_size)


def end_in_chunks(state: CellState, node: Node) -> int:
    """Return how many whole chunks there are from the root to the node's end. Does not change the state."""
    return node.end // (chunk_pages(state.tree.page_size) * state.tree.page_size)
