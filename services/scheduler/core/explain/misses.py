"""Why a part of a request's prompt is computed though there is a cache, found at its admission. Changes nothing.

From the end of the reused part on, in this order: nodes that its worker cannot use, chunks of a fetch in flight, tokens
that others are computing, remembered departures (:mod:`recollection`), and then nothing is known. The end of a prompt
that fills no page, or whose last token ends one, is computed in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import HEAD_TOKENS, Path
from services.scheduler.core.waiting import transient
from shared.ids import TOKEN_BYTES
from shared.messages.explanations import PromptSpan, Reason

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.explain.recollection import Departed, Recollection
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker

MOST_SPANS = 64
MOST_NAMESPACES = 16
"""Other namespaces at most, the newest, that are searched for the same tokens."""

_REASON_OF: dict[str, Reason] = {
    "evicted": "evicted",
    "displaced": "evicted",
    "refused": "not_admitted",
    "flushed": "evicted",
    "failed": "failed",
    "lost": "evicted",
    "lossy": "other_fidelity",
}


@dataclass(slots=True)
class Missed:
    """Spans of computed tokens from ``position`` on, in order and without a gap, up to ``limit`` tokens."""

    position: int
    limit: int
    spans: list[PromptSpan] = field(default_factory=list)

    def reach(self, end: int, reason: Reason, gone: Departed | None = None) -> None:
        """Give this reason for tokens from ``position`` up to ``end``, if any are left."""
        end = min(end, self.limit)
        if end <= self.position:
            return
        last = self.spans[-1] if self.spans else None
        start = self.position
        if gone is None and last is not None and last.reason == reason and not last.departure:
            start = last.start
            self.spans.pop()
        if gone is None:
            span = PromptSpan(start=start, end=end, source="computed", reason=reason)
        else:
            span = PromptSpan(
                start=start,
                end=end,
                source="computed",
                reason=reason,
                departure=gone.departure,
                tier=gone.tier,
                policy=gone.policy,
                at_ns=gone.at_ns,
            )
        self.spans.append(span)
        self.position = end


def missed_spans(
    state: CellState,
    memory: Recollection,
    request: Request,
    worker: Worker,
    path: Path,
    found: PrefixMatch,
    cached: int,
) -> list[PromptSpan]:
    """Return why tokens of the prompt from ``cached`` on are computed, as consecutive spans.

    ``path`` is the match in the tree, ``found`` the reused part of it. To be called while the request still waits: when
    it is admitted, it forgets what it waited for.
    """
    prompt_tokens = request.submit.prompt_tokens
    page_size = state.tree.page_size
    whole = min((request.token_count - 1) // page_size * page_size, prompt_tokens)
    missed = Missed(cached, prompt_tokens)
    if not request.may_reuse:
        missed.reach(prompt_tokens, "opted_out")
        return missed.spans
    if cached < whole:
        missed.limit = whole
        _not_reached(state, request, worker, path, found, missed)
        _on_its_way(request, missed)
        _being_computed(state, request, worker, missed)
        if missed.position < whole:
            _gone(state, memory, request, found, missed)
        missed.limit = prompt_tokens
    is_last = prompt_tokens % page_size == 0 or prompt_tokens - whole == 1
    missed.reach(prompt_tokens, "last_token" if is_last else "partial_chunk")
    return missed.spans


def _not_reached(
    state: CellState, request: Request, worker: Worker, path: Path, found: PrefixMatch, missed: Missed
) -> None:
    """Note nodes that the tree has and the worker cannot use, or does not."""
    storage_id = state.storage_id_of(worker)
    used = len(found.device) + len(found.joined) + len(found.loaded)
    for node, pages in path[used:]:
        reason: Reason = "elsewhere"
        if worker.worker_id in node.loading:
            reason = "deadline" if request.patience.is_over else "pending"
        elif storage_id in node.quarantined:
            reason = "failed"
        elif storage_id in node.host:
            reason = "too_little"
        missed.reach(node.depth + pages * state.tree.page_size, reason)


def _on_its_way(request: Request, missed: Missed) -> None:
    """Note chunks in flight for it, as KV or as hidden states, that it does not wait for any longer."""
    reason: Reason = "deadline" if request.patience.is_fetch_over else "pending"
    if request.prefetch.fetch:
        missed.reach(request.prefetch.end, reason)
    if request.hidden.run is not None and request.hidden.run.depth <= missed.position < request.hidden.run.arrived:
        missed.reach(request.hidden.run.goal, "pending")  # Restored chunks are noted when they are restored.
    if request.hidden.refusals:
        missed.reach(missed.limit, "failed")


def _being_computed(state: CellState, request: Request, worker: Worker, missed: Missed) -> None:
    """Note tokens that another request computes: too few to wait for, or the wait's deadline passed."""
    page_size = state.tree.page_size
    path = transient.match(state.transient, request.submit.namespace, request.tokens, missed.limit // page_size)
    end = sum(pages for _, pages in path) * page_size
    for node, pages in reversed(path):
        if end <= missed.position:
            return
        for name in state.transient.marks[node.id].get(worker.worker_id, ()):
            if name != request.request_id:
                missed.reach(end, "deadline" if request.patience.is_over else "pending")
                return
        end -= pages * page_size


def _gone(state: CellState, memory: Recollection, request: Request, found: PrefixMatch, missed: Missed) -> None:
    """Note remembered departures, span after span, and a reason for the rest."""
    tokens = request.submit.prompt
    known = found.nodes
    for node in known if memory.departed else ():
        # A part of it may be cached again: then the rest left together with that part.
        departed = memory.departed.get(node.digest)
        if departed is not None:
            _take(state, departed, tokens, node.depth, missed)
    base = known[-1] if known else None
    position = found.pages * state.tree.page_size if base is not None else 0
    digest = base.end_digest if base is not None else root_digest(request.submit.namespace)
    while missed.position < missed.limit and len(missed.spans) < MOST_SPANS:
        digest = extend(digest, tokens[position * TOKEN_BYTES : missed.position * TOKEN_BYTES])
        position = missed.position
        departed = _departed_at(state, memory, digest, tokens, position)
        if departed is None or not _take(state, departed, tokens, position, missed):
            break
    if missed.position < missed.limit:
        missed.reach(missed.limit, _unknown(state, memory, request, digest, tokens, position))


def _departed_at(state: CellState, memory: Recollection, digest: int, tokens: bytes, position: int) -> Departed | None:
    """Return the departed span that began here, or None.

    A node is known by its head, which may be shorter where pages are small.
    """
    departed = memory.departed
    if not departed:
        return None
    page_size = state.tree.page_size
    longest = max(page_size, HEAD_TOKENS // page_size * page_size)
    for length in range(longest, 0, -page_size):
        head = tokens[position * TOKEN_BYTES : (position + length) * TOKEN_BYTES]
        if len(head) == length * TOKEN_BYTES:
            found = departed.get(extend(digest, head))
            if found is not None:
                return found
    return None


def _take(state: CellState, departed: Departed, tokens: bytes, start: int, missed: Missed) -> bool:
    """Explain the tokens that a departed span from token ``start`` shares with ``tokens``; return whether any."""
    before = missed.position
    missed.reach(
        start + _common_tokens(state, departed.tokens, tokens, start), _REASON_OF[departed.departure], departed
    )
    return missed.position > before


def _common_tokens(state: CellState, span: bytes, tokens: bytes, start: int) -> int:
    """Return how many tokens, in whole pages, ``span`` shares with ``tokens`` from ``start`` on."""
    offset, page = start * TOKEN_BYTES, state.tree.page_token_bytes
    if tokens.startswith(span, offset):
        return len(span) // TOKEN_BYTES
    low, high = 0, min(len(span), len(tokens) - offset) // page
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(span[: middle * page], offset):
            low = middle
        else:
            high = middle - 1
    return low * state.tree.page_size


def _unknown(
    state: CellState, memory: Recollection, request: Request, digest: int, tokens: bytes, position: int
) -> Reason:
    """Return the reason for tokens from ``position`` on that no departure explains."""
    if _is_elsewhere(state, request, position):
        return "other_salt"
    if memory.is_whole:
        return "never_stored"
    # Uses are remembered for longer than departures, and by snapshots too.
    length = max(state.tree.page_size, HEAD_TOKENS)
    head = tokens[position * TOKEN_BYTES : (position + length) * TOKEN_BYTES]
    frequency, _ = state.hotness.lookup(extend(digest, head))
    return "unknown" if frequency else "never_stored"


def _is_elsewhere(state: CellState, request: Request, position: int) -> bool:
    """Return whether one of the newest other namespaces matches more of the same tokens."""
    tree = state.tree
    most = min((request.token_count - 1) // tree.page_size, position // tree.page_size + 1)  # One page more is enough.
    for namespace in islice(reversed(tree.roots), MOST_NAMESPACES):
        if namespace != request.submit.namespace:
            path = match_prefix(tree, namespace, request.submit.prompt, most)
            if sum(pages for _, pages in path) * tree.page_size > position:
                return True
    return False
