"""What the next step computes. Pure: reads running requests and the batch at the head, changes nothing.

A step is one token of every decoding request that has page room, then the chunks of the next RunBatch
(DESIGN section 5). A chunk whose prefix is not on the device is rejected, never computed on top of nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.worker.requests import RunningRequest
from shared.messages.worker_plans import PrefillChunk


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one request: its tokens ``[start, end)``. ``samples``: the last row yields the next token."""

    request: RunningRequest
    start: int
    end: int
    samples: bool
    is_chunk: bool

    @property
    def rows(self) -> int:
        return self.end - self.start


def decodes(requests: Iterable[RunningRequest]) -> list[Work]:
    """One token of every decoding request that has page room, in order of admission."""
    return [
        Work(request, request.computed, request.computed + 1, samples=True, is_chunk=False)
        for request in requests
        if request.is_decoding and request.computed < request.capacity
    ]


def chunks(requests: Mapping[str, RunningRequest], planned: Sequence[PrefillChunk]) -> tuple[list[Work], list[str]]:
    """Work for the planned chunks, one a request, and the ids of requests whose chunk cannot be computed now."""
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
    """Whether the chunk continues KV that is there.

    Recomputing tokens whose KV is there already is fine: same slots, same values.
    """
    return (
        chunk.attempt == request.attempt
        and not request.is_decoding
        and 0 <= chunk.start < chunk.end <= min(len(request.tokens), request.capacity)
        and chunk.start <= request.computed
    )


def still_computable(work: Iterable[Work]) -> tuple[list[Work], list[Work]]:
    """Split ``work`` after loads have failed: what still has its prefix, and what has not."""
    good: list[Work] = []
    lost: list[Work] = []
    for item in work:
        (good if item.start <= item.request.computed else lost).append(item)
    return good, lost


def pages_of(work: Work) -> frozenset[int]:
    """Pages that this work writes; when it failed, nobody may count on them."""
    size = work.request.page_size
    return frozenset(work.request.pages[work.start // size : -(-work.end // size)].tolist())
