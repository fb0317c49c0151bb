"""The work of the next step. Pure: reads running requests and the batch at the head, changes nothing.

A step is one token of every decoding request that has page room, then the chunks of the next RunBatch. A chunk whose
prefix is not on the device is rejected, never computed without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.worker.requests import RunningRequest
from shared.messages.base import unpack_int32
from shared.messages.worker_plans import PageLoad, PrefillChunk


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one request: its tokens ``[start, end)``. ``samples``: the last row yields the next token.

    A decode row may have ``proposed`` tokens behind it, up to ``end``: each row yields a token then, which counts if
    all proposals before it were right.
    """

    request: RunningRequest
    start: int
    end: int
    samples: bool
    is_chunk: bool
    proposed: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows, one for each token."""
        return self.end - self.start

    def with_fewer(self, rows: int) -> Work:
        """Return the work with proposals for ``rows`` rows at most; work without proposals stays as it is."""
        if rows >= self.rows or not self.proposed:
            return self
        return replace(self, end=self.start + rows, proposed=self.proposed[: rows - 1])


def decodes(requests: Iterable[RunningRequest]) -> list[Work]:
    """Return one token of work for every decoding request that has page room, in order of admission."""
    return [
        Work(request, request.computed, request.computed + 1, samples=True, is_chunk=False)
        for request in requests
        if request.is_decoding and request.computed < request.capacity
    ]


def chunks(requests: Mapping[str, RunningRequest], planned: Sequence[PrefillChunk]) -> tuple[list[Work], list[str]]:
    """Return the work of the planned chunks, one for each request.

    Also return the ids of requests whose chunk cannot be computed now.
    """
    work: list[Work] = []
    rejected: list[str] = []
    seen: set[str] = set()
    for chunk in planned:
        request = requests.get(chunk.request_id)
        if request is None or chunk.request_id in seen or not is_computable(request, chunk):
            rejected.append(chunk.request_id)
            continue
        seen.add(chunk.request_id)
        work.append(Work(request, chunk.start, chunk.end, samples=chunk.end == len(request.tokens), is_chunk=True))
    return work, rejected


def is_computable(request: RunningRequest, chunk: PrefillChunk) -> bool:
    """Return whether the chunk continues KV that is there.

    Recomputing tokens whose KV is there already is fine: same slots, same values. Tokens read of a sparse prefix are
    never computed.
    """
    return (
        chunk.attempt == request.attempt
        and not request.is_decoding
        and 0 <= chunk.start < chunk.end <= min(len(request.tokens), request.capacity)
        and chunk.start <= request.computed
        and request.can_compute(chunk.start, chunk.end)
    )


def split_lost(
    work: Iterable[Work], loads: Sequence[PageLoad], failed: Collection[str], lost_pages: Collection[int]
) -> tuple[list[Work], list[Work], frozenset[int]]:
    """Split ``work`` into what has its prefix, and what stands on missing pages; return these pages, too.

    Lost are ``lost_pages``, the pages of all ``loads`` of a request that failed for whatever reason (the scheduler
    undoes such a load, and others may stand on it: a bundle hit), and the pages that lost chunks were to write; so one
    loss may lead to the next. Decode steps stand on their own pages and are never lost.
    """
    good, lost = list(work), list[Work]()
    gone, failures = set(lost_pages), set(failed)
    while True:
        gone.update(page for load in loads if load.request_id in failures for page in pages_of_load(load))
        fallen = [item for item in good if _stands_on(item, gone)]
        if not fallen:
            return good, lost, frozenset(gone)
        good = [item for item in good if not _stands_on(item, gone)]
        lost += fallen
        for item in fallen:
            failures.add(item.request.request_id)
            gone.update(pages_of(item))


def _stands_on(work: Work, pages: Collection[int]) -> bool:
    """Return whether tokens before this chunk lie in any of ``pages``."""
    if not work.is_chunk or not pages:
        return False
    before = work.request.pages[: -(-work.start // work.request.page_size)]
    return any(page in pages for page in before.tolist())


def pages_of_load(load: PageLoad) -> list[int]:
    """Return the device pages that a load fills."""
    return unpack_int32(load.device_pages[: len(load.device_pages) // 4 * 4])


def pages_of(work: Work) -> frozenset[int]:
    """Return the pages that this work writes; if it fails, they are void."""
    size = work.request.page_size
    return frozenset(work.request.pages[work.start // size : -(-work.end // size)].tolist())
