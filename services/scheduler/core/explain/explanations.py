"""Records of admissions so that they can be explained later, and the answers to requests for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.prefix_tree import Path, head_of
from services.scheduler.core.explain.divergence_points import find_divergence_point
from services.scheduler.core.explain.misses import missed_spans
from shared.ids import TOKEN_BYTES
from shared.messages.explanations import (
    Admission,
    Admissions,
    Divergences,
    GetAdmissions,
    GetDivergences,
    PromptSpan,
    Source,
)

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.explain.recollection import Recollection
    from services.scheduler.core.request import Request
    from services.scheduler.core.sparse.sparse_records import SparseSpan
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Chunk

MOST_ASKED = 256
MOST_POINTS_TOLD = 64


def note_admission(
    step: Step,
    memory: Recollection,
    request: Request,
    worker: Worker,
    path: Path,
    found: PrefixMatch,
    span: SparseSpan | None,
) -> None:
    """Note where the prompt of a request that is about to be admitted comes from, and why the rest is computed.

    ``path`` is the match in the tree, ``found`` the reused part of it, ``span`` the part behind it that is read
    sparsely.
    """
    state = step.state
    prompt_tokens = request.submit.prompt_tokens
    cached = found.pages * state.tree.page_size
    spans = _reused(request, found, prompt_tokens)
    if span is not None:
        end = min(span.end, prompt_tokens)
        if span.start < end:
            spans.append(PromptSpan(start=span.start, end=end, source="sparse"))
        cached = span.end
        _note_lossy(step, memory, request, span)
    cached = min(cached, prompt_tokens)
    spans += missed_spans(state, memory, request, worker, path, found, cached)
    point = find_divergence_point(state, request, worker, found, cached, spans)
    if point.kind == "diverged" and point.lost_tokens and not request.admission:  # Later attempts lose it again.
        memory.note_point(request.submit.namespace, point, request.request_id, step.time_ns)
    memory.note_admitted(
        Admission(
            request_id=request.request_id,
            attempt=request.attempt,
            worker_id=worker.worker_id,
            accepted_ns=request.accepted_ns,
            admitted_ns=step.time_ns,
            waits=tuple(memory.waits.get(request.request_id, ())),
            prompt=tuple(spans),
            point=point,
            ways=memory.ways.pop(request.request_id, ()),
        ),
    )


def _note_lossy(step: Step, memory: Recollection, request: Request, span: SparseSpan) -> None:
    """Note that what this request computes behind a sparse prefix would be cached if the prefix were whole."""
    state, tokens = step.state, request.submit.prompt
    page = state.tree.page_token_bytes
    behind = tokens[span.end * TOKEN_BYTES : len(tokens) // page * page]
    if behind and request.submit.cache.write:
        above = extend(root_digest(request.submit.namespace), tokens[: span.end * TOKEN_BYTES])
        digest = extend(above, head_of(state.tree, behind))
        memory.note_departed(digest, behind, "lossy", "", "", step.time_ns)


def note_restored(memory: Recollection, request: Request, chunk: Chunk) -> None:
    """Note a chunk of an admitted request's prompt that was restored from hidden states instead of computed."""
    attempts = memory.admissions.get(request.request_id)
    if not attempts or attempts[-1].attempt != chunk.attempt:
        return
    spans = overlay(attempts[-1].prompt, chunk.start, chunk.end)
    attempts[-1] = msgspec.structs.replace(attempts[-1], prompt=spans)


def find_admissions(state: CellState, call: GetAdmissions) -> Admissions:
    """Return the remembered admissions of these requests, for at most MOST_ASKED of them. Changes nothing."""
    if state.recollection is None:
        return Admissions()
    admissions = state.recollection.admissions
    found = [attempt for name in call.request_ids[:MOST_ASKED] for attempt in admissions.get(name, ())]
    return Admissions(admissions=tuple(found))


def find_divergences(state: CellState, call: GetDivergences) -> Divergences:
    """Return the cell's divergence points that lost most tokens, the costliest first. Changes nothing."""
    memory = state.recollection
    if memory is None:
        return Divergences()
    # Among equals the first noted comes first.
    points = sorted(memory.points.values(), key=lambda each: -each.lost_tokens)
    return Divergences(since_ns=memory.since_ns, points=tuple(points[: min(max(0, call.most), MOST_POINTS_TOLD)]))


def overlay(spans: tuple[PromptSpan, ...], start: int, end: int) -> tuple[PromptSpan, ...]:
    """Return the spans with tokens [start, end) marked as restored from hidden states. Pure."""
    after: list[PromptSpan] = []
    for span in spans:
        low, high = max(span.start, start), min(span.end, end)
        if low >= high:
            after.append(span)
            continue
        if span.start < low:
            after.append(msgspec.structs.replace(span, end=low))
        if after and after[-1].source == "hidden" and after[-1].end == low:
            low = after.pop().start
        after.append(PromptSpan(start=low, end=high, source="hidden"))
        if high < span.end:
            after.append(msgspec.structs.replace(span, start=high))
    return tuple(after)


def _reused(request: Request, found: PrefixMatch, prompt_tokens: int) -> list[PromptSpan]:
    """Return the spans of the reused part, neighbours of one source joined. Fetched tokens count as their origin's."""
    spans: list[PromptSpan] = []
    sources: list[Source] = ["device"] * len(found.device)
    sources += ["neighbour" if name else "host" for name in found.sources]
    fetched_to = request.prefetch.brought_to
    first = max(0, len(found.device) - 1)  # Nodes on the device are one span, which ends with the last of them.
    for node, source in zip(found.nodes[first:], sources[first:], strict=True):
        end = node.end
        if source == "host" and request.prefetch.brought_from < fetched_to:
            cut = min(max(node.depth, request.prefetch.brought_from), end)
            behind = max(cut, min(end, fetched_to))
            lent = min(behind, cut + max(0, request.prefetch.brought_lent - (cut - request.prefetch.brought_from)))
            remote = max(lent, min(behind, fetched_to - request.prefetch.brought_remote))
            _add(spans, cut, "host", prompt_tokens)
            _add(spans, lent, "lent", prompt_tokens)
            _add(spans, remote, "disk", prompt_tokens)
            _add(spans, behind, "remote", prompt_tokens)
            _add(spans, end, "host", prompt_tokens)
        else:
            _add(spans, end, source, prompt_tokens)
    return spans


def _add(spans: list[PromptSpan], end: int, source: Source, most: int) -> None:
    """Append tokens from the last span's end to ``end``, at most ``most``, as coming from ``source``."""
    start = spans[-1].end if spans else 0
    end = min(end, most)
    if start >= end:
        return
    if spans and spans[-1].source == source:
        start = spans.pop().start
    spans.append(PromptSpan(start=start, end=end, source=source))
