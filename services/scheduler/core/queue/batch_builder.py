"""A batch while it is being formed: the work in it so far, and the room that is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import Path, PrefixTree, ancestors, namespace_of
from services.scheduler.core.rates import load_compute_ratio
from shared.ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.tiers.under_way import Chunk, Load
    from shared.messages.worker_plans import PageLoad, RestoreChunk

Start = tuple[str, bytes]
"""A namespace, and the tokens from the root to the end of a node's first page, packed int32."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A waiting request as a scan of the queue found it. ``load`` and ``compute`` count tokens of its prompt.

    ``stage`` is the builder's number of admissions at that time: after another, ``found`` is out of date.
    """

    request: Request
    path: Path
    found: PrefixMatch
    load: int
    compute: int
    stage: int


@dataclass(slots=True, eq=False)
class BatchBuilder:
    """A batch being formed, with room for ``budget`` tokens and ``places`` requests more. Counts are in tokens."""

    budget: int
    places: int
    chunks: list[Chunk] = field(default_factory=list)
    orders: list[PageLoad] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    loading: dict[int, str] = field(default_factory=dict)  # Nodes that it loads, and their sources.
    loaded: int = 0
    computed: int = 0
    restores: list[RestoreChunk] = field(default_factory=list)
    restored: int = 0
    beside: int = 0  # Restored tokens as computed tokens of equal device time.
    context: int = 0  # Sum of the contexts before each computed token.
    stage: int = 0  # Requests admitted so far.
    standing: dict[str, None] = field(default_factory=dict)  # Requests that reuse its loads or have a sparse prefix.

    @property
    def is_full(self) -> bool:
        """Whether tokens or places are used up."""
        return self.budget <= 0 or self.places <= 0

    def split(self) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks that are restored or need its loads, and those that can be computed before these end."""
        parts: tuple[list[Chunk], list[Chunk]] = ([], [])
        for chunk in self.chunks:
            waits = chunk.is_restored or chunk.request_id in self.standing
            parts[not waits].append(chunk)
        return parts

    def add_chunk(self, chunk: Chunk) -> None:
        """Add a chunk to compute, and take its tokens off the budget."""
        size = chunk.end - chunk.start
        self.chunks.append(chunk)
        self.budget -= size
        self.computed += size
        self.context += size * (chunk.start + chunk.end) // 2

    def add_restored(self, chunk: Chunk, order: RestoreChunk, share: float, load_share: float) -> None:
        """Add a chunk to restore; each token takes ``share`` of a computed token's device time.

        It moves ``load_share`` of the bytes of its KV to the device, and so counts as a load of that many tokens.
        """
        size = chunk.end - chunk.start
        self.chunks.append(chunk)
        self.restores.append(order)
        self.restored += size
        self.budget -= ceil(size * share)
        self.loaded += round(size * load_share)
        self.beside += round(size * share)


def is_loading_bound(state: CellState, worker: Worker, builder: BatchBuilder, load: int = 0, compute: int = 0) -> bool:
    """Return whether the batch would wait for its loads, with so many more tokens to load and to compute.

    That is, the ratio of aggregated load to aggregated computation is above the limit (Strata 4.3.2).
    """
    loaded, computed = builder.loaded + load, builder.computed + builder.beside + compute
    if not loaded:
        return False
    context = builder.context // max(1, builder.computed)
    return loaded > load_compute_ratio(state, worker, context) * computed


def bundle_hits_among(state: CellState, builder: BatchBuilder, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that reuse what the batch loads: bundle hits (Strata 4.3.2).

    Keeps order; changes nothing.
    """
    if not candidates:
        return []
    standing = stand_on(state, starts_of_loads(state.tree, builder), [item.request for item in candidates])
    names = {request.request_id: None for request in standing}
    return [item for item in candidates if item.request.request_id in names]


def stand_on(state: CellState, starts: Sequence[Start], requests: Sequence[Request]) -> list[Request]:
    """Return the requests whose tokens begin with one of ``starts`` (:func:`starts_of_loads`). Changes nothing.

    Such a request reuses all nodes above a load and at least a page of the load itself. Comparing them in place costs
    less than following where its last match ended, and far less than to match again.
    """
    page_token_bytes = state.tree.page_token_bytes
    any_start = tuple(start for _, start in starts)

    def stands_on_it(request: Request) -> bool:
        tokens = request.tokens
        if not request.may_reuse:
            return False
        usable = (len(tokens) - TOKEN_BYTES) // page_token_bytes * page_token_bytes  # The last token must be computed.
        namespace = request.submit.namespace
        return any(space == namespace and len(start) <= usable and tokens.startswith(start) for space, start in starts)

    # For nearly all waiting requests the prompt decides; those with output are compared with it.
    likely = [request for request in requests if request.submit.prompt.startswith(any_start) or request.output]
    return [request for request in likely if stands_on_it(request)]


def starts_of_loads(tree: PrefixTree, builder: BatchBuilder) -> list[Start]:
    """Return for each uppermost node that the batch loads its namespace and all tokens to the end of its first page."""
    starts = []
    for node_id in builder.loading:
        node = tree.nodes[node_id]
        if node.parent not in builder.loading:
            above = ancestors(tree, tree.nodes[node.parent])
            first_page = node.tokens_between(0, tree.page_size)
            tokens = b"".join(held.tokens for held in reversed(above)) + first_page
            starts.append((namespace_of(tree, node), tokens))
    return starts
