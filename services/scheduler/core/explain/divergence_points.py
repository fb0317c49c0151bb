"""The token at which a prompt leaves the nearest cached path, and what that cost. Changes nothing.

The tree matches whole pages. Within the page in which a match ends, the path that agrees with the prompt for most
tokens is the nearest: the rest of the edge on which it ended or, at the end of a node, one of the node's newest
children. Tokens that both sides have behind the difference, such as the rest of a system prompt behind its date, are
found by blocks of the cached side that occur in the prompt: so much would have been reused had they not differed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.cache.prefix_match import match_again, match_below
from services.scheduler.core.cache.prefix_tree import page_count
from services.scheduler.core.rates import has_compute_speed, recompute_us
from shared.ids import TOKEN_BYTES
from shared.messages.explanations import DivergencePoint, PointKind, PromptSpan

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.cache.prefix_tree import Node, PrefixTree
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker

TOLD_TOKENS = 64
"""Tokens reported of each side, and of the common part before (and up to a page more)."""

MOST_SIBLINGS = 16
"""Newest children of a node that are searched for the nearest."""

MOST_COMPARED = 8192
"""Tokens behind a divergence whose two sides are compared."""

MOST_COMPARED_NODES = 16
"""Nodes of the cached side at most that are concatenated for the comparison."""

BLOCK_BYTES = 16 * TOKEN_BYTES
"""Bytes that must agree for the two sides to be in step again."""

_FEW_BYTES = 64 * TOKEN_BYTES
"""Bytes, such as a page's, that are compared as one number: a few calls on arrays take longer."""

MOST_RUNS = 8
_MOST_TRIES = 16
"""Bounds searches: tokens can be chosen so that a block occurs everywhere except at the start of a token."""
_SKIPPED_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Distances behind the last place in step at which the cached side is searched for a block that the prompt has too."""


def find_divergence_point(
    state: CellState, request: Request, worker: Worker, found: PrefixMatch, cached: int, spans: list[PromptSpan]
) -> DivergencePoint:
    """Return where the prompt of a request that is about to be admitted leaves what is cached, on any tier.

    ``found`` is the reused part, ``cached`` its size in tokens including a sparse prefix, and ``spans`` says where
    each part comes from. Chunks that are only on a disk have no node: they were tried for a fetch before.
    """
    if not request.may_reuse:
        return DivergencePoint(kind="opted_out")
    gone = [span for span in spans if span.departure and span.departure != "lossy"]
    if gone:
        lost = sum(span.end - span.start for span in gone)
        return _point(state, request, worker, "evicted", gone[0].start, b"", lost)
    run = request.hidden.run
    if run is not None and run.depth <= cached < run.arrived:
        cached = run.goal
    tree, prompt = state.tree, request.submit.prompt
    used = found.loaded or found.joined or found.device
    node, offset = _end_of_match(tree, request.submit.namespace, prompt, used[-1] if used else None)
    start = 0 if node is None else node.depth * TOKEN_BYTES + offset
    if start < cached * TOKEN_BYTES:
        return _point(state, request, worker, "continued", cached, b"", 0)
    if node is None:
        return _point(state, request, worker, "new", 0, b"", 0)
    nearest: Node | None = node
    if offset < node.size * TOKEN_BYTES:
        first = offset // TOKEN_BYTES  # Whole pages agree up to here, and the next one does not.
        common = common_bytes(prompt, start, node.tokens_between(first, first + tree.page_size), 0)
    else:
        offset, (nearest, common) = 0, _nearest_child(tree, node, prompt, start)
    at = start + common
    if nearest is None or at >= len(prompt):
        return _point(state, request, worker, "continued", at // TOKEN_BYTES, b"", 0)
    if not at:
        return _point(state, request, worker, "new", 0, b"", 0)
    other = _path_behind(tree, nearest, offset + common)
    lost = tokens_in_step(prompt[at : at + MOST_COMPARED * TOKEN_BYTES], other)
    return _point(state, request, worker, "diverged", at // TOKEN_BYTES, other, lost)


def _point(
    state: CellState, request: Request, worker: Worker, kind: PointKind, position: int, cached: bytes, lost: int
) -> DivergencePoint:
    """Return the point with some of the tokens around it, and the time lost."""
    page_size, at, prompt = state.tree.page_size, position * TOKEN_BYTES, request.submit.prompt
    told = TOLD_TOKENS * TOKEN_BYTES
    return DivergencePoint(
        kind=kind,
        position=position,
        page_start=position // page_size * page_size,
        page_size=page_size,
        before=prompt[max(0, at - told - state.tree.page_token_bytes) : at],
        prompt=prompt[at : at + told],
        cached=cached[:told],
        lost_tokens=lost,
        lost_us=round(recompute_us(state, worker, position, lost)) if lost and has_compute_speed(state, worker) else 0,
    )


def _end_of_match(tree: PrefixTree, namespace: str, prompt: bytes, used: Node | None) -> tuple[Node | None, int]:
    """Return the node in which the match of whole pages of ``prompt`` ends, and the byte offset in it.

    None in an empty namespace. ``used`` is a node on the way. Nodes matched before may have been cut or evicted to make
    room.
    """
    pages = len(prompt) // tree.page_token_bytes
    if used is not None and used.end <= pages * tree.page_size:
        path = match_below(tree, used, prompt, pages) or [(used, page_count(tree, used))]
    else:  # The reused part goes on behind the prompt, in an earlier attempt's answer.
        path = match_again(tree, namespace, prompt, pages, *((0, 0) if used is None else (used.id, used.end)))
    if path:
        node, pages = path[-1]
        return node, pages * tree.page_token_bytes
    root = tree.roots.get(namespace)
    return (None if root is None else tree.nodes[root]), 0


def _nearest_child(tree: PrefixTree, node: Node, prompt: bytes, start: int) -> tuple[Node | None, int]:
    """Return the newest of the children that agree longest with ``prompt[start:]``, and the equal bytes of a page."""
    children = node.child_ids
    newest = children if isinstance(children, tuple) else reversed(children)
    ours = prompt[start : start + tree.page_token_bytes]
    nodes, nearest, common, nearer = tree.nodes, None, 0, 0
    for child_id in islice(newest, MOST_SIBLINGS):
        child = nodes[child_id]
        if child.tokens_between(0, nearer) == ours[: nearer * TOKEN_BYTES]:
            nearest, common = child, common_bytes(ours, 0, child.tokens_between(0, tree.page_size), 0)
            if common == len(ours):
                break
            nearer = common // TOKEN_BYTES + 1
    return nearest, common


def _path_behind(tree: PrefixTree, node: Node, offset: int) -> bytes:
    """Return tokens of the cached path from a byte of ``node`` on, by each node's newest child; a bounded number."""
    first = offset // TOKEN_BYTES
    parts = [node.tokens_between(first, first + MOST_COMPARED)]
    size = node.size - first
    while size < MOST_COMPARED and len(parts) < MOST_COMPARED_NODES and node.children:
        children = node.children
        node = tree.nodes[children if isinstance(children, int) else next(reversed(children.values()))]
        parts.append(node.tokens_between(0, MOST_COMPARED - size))
        size += node.size
    return b"".join(parts)


def tokens_in_step(ours: bytes, theirs: bytes) -> int:
    """Return how many tokens of ``ours`` occur in ``theirs`` in the same order, in runs of at least a block. Pure."""
    found = mine = other = 0
    for _ in range(MOST_RUNS):
        step = _next_in_step(ours, mine, theirs, other)
        if step is None:
            break
        mine, other = step
        run = common_bytes(ours, mine, theirs, other)
        found, mine, other = found + run, mine + run, other + run
    return found // TOKEN_BYTES


def _next_in_step(ours: bytes, mine: int, theirs: bytes, other: int) -> tuple[int, int] | None:
    """Return the byte offsets at which both next have a common run, from its first token; None without one."""
    if len(ours) - mine < BLOCK_BYTES:
        return None
    for skipped in _SKIPPED_TOKENS:
        there = other + skipped * TOKEN_BYTES
        block = theirs[there : there + BLOCK_BYTES]
        if len(block) < BLOCK_BYTES:
            return None
        here = _find_tokens(ours, block, mine)
        if here >= 0:
            while min(here - mine, there - other) >= TOKEN_BYTES and _same_before(ours, here, theirs, there):
                here, there = here - TOKEN_BYTES, there - TOKEN_BYTES
            return here, there
    return None


def _find_tokens(ours: bytes, block: bytes, start: int) -> int:
    """Return the byte offset of these tokens in ``ours``, -1 for nowhere.

    Matches across token boundaries are skipped.
    """
    here = start - 1
    for _ in range(_MOST_TRIES):
        here = ours.find(block, here + 1)
        if here < 0 or not here % TOKEN_BYTES:
            return here
    return -1


def _same_before(ours: bytes, here: int, theirs: bytes, there: int) -> bool:
    return ours[here - TOKEN_BYTES : here] == theirs[there - TOKEN_BYTES : there]


def common_bytes(ours: bytes, mine: int, theirs: bytes, other: int) -> int:
    """Return how many bytes of whole tokens are equal from these offsets on. Pure."""
    length = min(len(ours) - mine, len(theirs) - other)
    one, another = ours[mine : mine + length], theirs[other : other + length]
    if one == another:
        return length
    if length <= _FEW_BYTES:
        differing = int.from_bytes(one, "little") ^ int.from_bytes(another, "little")
        return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES) * TOKEN_BYTES
    differs = np.frombuffer(one, "<i4") != np.frombuffer(another, "<i4")
    return int(differs.argmax()) * TOKEN_BYTES
