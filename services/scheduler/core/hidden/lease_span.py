"""For which chunks a request gets a state lease: those in a row that it computes whole and that nobody has or saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, ancestors, page_count
from services.scheduler.core.tiers.catalogue import is_hidden_kept
from services.scheduler.core.tiers.chunk_run import ChunkNames
from shared.chunks import chunk_tokens

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage

_LARGEST_SHARE = 4
"""One request gets at most one in so many pages of a state pool, or a single chunk."""


def names_of_chunks(state: CellState, request: Request) -> ChunkNames:
    """Names of the whole chunks of a request's tokens."""
    tree = state.tree
    nodes = reversed(ancestors(tree, tree.nodes[request.node])) if request.node else ()
    path = [(node, page_count(tree, node)) for node in nodes]
    tokens = request.tokens
    return ChunkNames(tree, request.submit.namespace, tokens, path, len(tokens) // tree.page_token_bytes)


def first_new_chunk(state: CellState, storage: Storage, request: Request, names: ChunkNames) -> int:
    """The first chunk that the request computes whole and that is not below host memory or on its way there.

    It is behind the last hole of what the request is restored from: a worker captures tokens in a row, and what is
    restored between two holes does not pass its model.
    """
    known = request.planned if request.run is None else max(request.planned, request.run.goal)
    first = -(-known // chunk_tokens(state.tree.page_size))
    while first < names.count and _is_kept(storage, names[first]):
        first += 1
    return first


def _is_kept(storage: Storage, name: bytes) -> bool:
    return is_hidden_kept(storage, name) or name in storage.chunks or name in storage.saving


def end_of_new_chunks(state: CellState, storage: Storage, request: Request, names: ChunkNames, first: int) -> int:
    """Behind the last chunk that the request can complete with the pages it has, up to one that another saves.

    Where the first would begin behind the prompt, what comes before it is not known yet: there is none then.
    """
    if first > names.count:
        return first
    end = chunks_to_come(state, request)
    for index in range(first, min(end, names.count)):
        if names[index] in storage.hidden_saving:
            return index
    return end


def chunks_to_come(state: CellState, request: Request, less: int = 0) -> int:
    """Whole chunks from the root that the request's device pages, but for ``less`` of them, have room for.

    The last token of the longest answer is sampled and never computed.
    """
    room = (len(request.pages) // PAGE_NUMBER_BYTES - less) * state.tree.page_size
    return min(room, request.max_tokens_total - 1) // chunk_tokens(state.tree.page_size)


def room_for_lease(storage: Storage, each: int, held: int) -> int:
    """Chunks for which a lease of ``held`` chunks may take pages of the state pool."""
    pool = storage.hidden_pool
    if pool is None:
        return 0
    most = max(1, pool.total // _LARGEST_SHARE // each)
    return min(pool.free // each, most - held)
