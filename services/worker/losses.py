"""The pages that a batch's requests rely on: those that its loads bring, and those that turn out to be missing.

Which request owns a page does not matter: requests share pages (a bundle hit).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from services.worker.outcome import Outcome
from services.worker.requests import RunningRequest
from services.worker.steps import Work, pages_of, pages_of_load, split_lost
from shared.messages.worker_plans import PageLoad, PrefillChunk, RestoreChunk, RunBatch


def cover(requests: Mapping[str, RunningRequest], order: RunBatch) -> frozenset[int]:
    """Count the pages being loaded as coverage of requests whose chunks or restorations stand on them.

    Return these pages.
    """
    loaded = frozenset(page for load in order.loads for page in pages_of_load(load))
    parts: tuple[PrefillChunk | RestoreChunk, ...] = (*order.chunks, *order.restores)
    for chunk in parts:
        request = requests.get(chunk.request_id)
        if request is not None and not request.is_decoding and chunk.start > request.computed:
            request.extend_coverage(loaded)
    return loaded


def drop_lost(
    outcome: Outcome, work: Sequence[Work], loads: Sequence[PageLoad], lost_pages: Collection[int]
) -> tuple[list[Work], frozenset[int]]:
    """Return the part of ``work`` that has its prefix, and all pages that are missing (``split_lost``).

    The rest is recorded in ``outcome`` as lost, and restorations without their prefix as failed.
    """
    kept, lost, gone = split_lost([*outcome.restored.done, *work], loads, outcome.failed, lost_pages)
    outcome.lost += lost
    outcome.keep(kept)
    wanted = {id(item) for item in work}
    return [item for item in kept if id(item) in wanted], gone


def lose(
    requests: Mapping[str, RunningRequest], bad: frozenset[int], *, but: Collection[str] = (), is_load: bool = False
) -> None:
    """Drop these pages from the coverage of requests that do not decode, except ``but``.

    With ``is_load`` usage no longer counts the lost tokens as loaded.
    """
    for request in requests.values() if bad else ():
        if not request.is_decoding and request.request_id not in but:
            lost = request.lose_pages(bad)
            if is_load:
                request.lose_loaded(lost)


def lose_unrestored(
    requests: Mapping[str, RunningRequest], outcome: Outcome, work: Sequence[Work], loads: Sequence[PageLoad]
) -> list[Work]:
    """Return the part of ``work`` that stands neither on a failed restoration nor on a load that is undone with it."""
    unwritten = frozenset[int]().union(*(pages_of(item) for item in outcome.restored.failed))
    kept, gone = drop_lost(outcome, work, loads, unwritten)
    lose(requests, gone, is_load=True)
    return kept


def lose_with_broken(requests: Mapping[str, RunningRequest], outcome: Outcome, loads: Sequence[PageLoad]) -> None:
    """Record as lost the work that stands on a chunk that raised or was refused, or on a load undone with it."""
    broken = [item for item, _ in outcome.broken if item.is_chunk] + outcome.refused
    unwritten = frozenset[int]().union(*(pages_of(item) for item in broken))
    _, gone = drop_lost(outcome, [one.work for one in outcome.done], loads, unwritten)
    lose(requests, gone, but=[item.request.request_id for item in broken])


def lose_refused(
    requests: Mapping[str, RunningRequest], outcome: Outcome, work: Sequence[Work], loads: Sequence[PageLoad]
) -> list[Work]:
    """Return the part of ``work`` that stands on no request in ``outcome.refused``.

    The sparse prefix of these could not be read: such a request has failed, and its load is undone with it.
    """
    unwritten = frozenset[int]().union(*(pages_of(item) for item in outcome.refused))
    kept, gone = drop_lost(outcome, work, loads, unwritten)
    lose(requests, gone, but=[item.request.request_id for item in outcome.refused])
    return kept
