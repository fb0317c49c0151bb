"""Hidden states on their way: what is being restored for a request, and what is being saved of it. Plain data of a
snapshot.

A run has stretches, the parts of a sequence with hidden states on a disk, and holes between them that are
computed. A turn of a conversation ends within a chunk. The next one computes the rest of that chunk, so no request
passes all of it through the model at once and its hidden states are not saved: each turn leaves a hole. A run of
hidden states goes on behind it once the hole's tokens are computed, by chunks as any others are. What follows works on
positions in tokens from the root; pages of a run are packed without its holes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from services.scheduler.core.cache.page_pool import PagePool
from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES
from services.scheduler.core.tiers.under_way import UnderWay
from shared.ids import chain_root
from shared.messages.pools import PoolHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.identities import ChunkNames
    from services.scheduler.core.state import Storage


Further = Literal["disk", "asked", "store", "goal"]
"""How a run of hidden states goes on: as far as the disk is known to have it; as far as the object store has it, which
is being asked for the first of it (``asked``) or has proved to have some (``store``); or no further than its goal."""


class Hole(msgspec.Struct, frozen=True):
    """Tokens [start, end) without hidden states in a run, with hidden states before or behind them. They are
    computed.
    """

    start: int
    end: int
    above: bytes  # Identity of the page before ``end``.


class HiddenRun(msgspec.Struct):
    """Hidden states of a request's tokens [depth, end) on its way from below host memory to its worker, less the holes.

    More of it follows up to ``goal`` as its pages come back, for a hidden pool may hold less than a prefix.
    ``pages`` (packed, one entry a page from ``depth`` on, none for holes) are leased pages of the storage's hidden
    pool; those of tokens up to ``arrived`` hold what was fetched. Where ``fetch`` is not 0 the storage still writes to
    the others. A hole counts as arrived once what is behind it is being fetched.
    """

    storage_id: str
    fetch: int
    depth: int
    end: int
    arrived: int
    pages: bytes
    identities: bytes  # 16 bytes a page.
    recomputed: int  # Layers that are computed from tokens.
    kind: str = ""  # What was planned, in the words of :func:`planner.plan_kind`,
    predicted_us: float = 0.0  # and how long it should take; 0 once it is not carried out as planned.
    began_ns: int = 0
    disk_us: float = 0.0  # What its fetches took that are over,
    restored_us: float = 0.0  # and what its worker took to restore so far.
    chunks: int = 0  # Ordered so far, those included that were given back.
    goal: int = 0
    above: bytes = b""  # Identity of the last page that was given back.
    holes: list[Hole] = []  # In order, between ``depth`` and ``goal``.
    further: Further = "disk"  # What may be ordered behind ``end``.


class HiddenFetch(UnderWay):
    """A FetchChunks of hidden states that is not over. It is for one request; once that is gone its pages wait for
    the end.
    """

    fetch_id: int
    storage_id: str
    request_id: str  # "" once it is not waited for.
    timer_id: str
    chunks: int  # Ordered.
    pages: bytes = b""  # To be given back when it is over, because no request has them any more.
    queued_bytes: float = 0.0  # Of other fetches, when it was ordered.
    is_question: bool = False  # It names chunks that only the object store may have: no fault if they do not come.
    followers: dict[str, None] = {}  # Others that waited for it at some time, because they share what it brings.


class OpenHiddenLease(UnderWay):
    """A HiddenLease, from its order to the worker's ``HiddenSaved``.

    ``names`` are the chunks, 16 bytes each, that are known to be saved under it: no other saves
    them meanwhile. ``pages`` are of whole chunks, one behind the other from ``depth`` on.
    Called off, what was computed under it is not to be trusted.
    """

    lease_id: int
    storage_id: str
    worker_id: str
    namespace: str
    key_id: str
    depth: int
    parent: bytes
    pages: bytes
    names: bytes = b""
    request_id: str = ""  # Whose tokens they are; "" once that request left the worker.
    timer_id: str = ""  # Runs from then on.
    value: float = 0.0  # How hot the sequence was when it was looked at last.


class HiddenSave(UnderWay):
    """A SaveChunks of hidden states that the storage has not answered. It holds its pages of the hidden pool until
    then.
    """

    save_id: int
    storage_id: str
    lease_id: int  # Of the lease under which the hidden states were saved.
    names: bytes  # 16 bytes each.
    pages: bytes
    timer_id: str


Stretch = tuple[int, int]
"""[start, end)."""

MOST_STRETCHES = 64
"""Of one run behind its first. Bounds what is weighed and what a run keeps."""

LONGEST_HOLE = 16
"""Chunks of a hole at the most. Bounds the names that are worked out of a new prompt."""


def stretches_behind(storage: Storage, names: ChunkNames, end: int, most: int) -> tuple[Stretch, ...]:
    """Chunks from ``end`` up to ``most`` with hidden states on the disk, in stretches. Does not mutate;
    O(chunks).
    """
    found: list[Stretch] = []
    known, most = storage.hidden.chunks, min(most, names.count)
    while len(found) < MOST_STRETCHES:
        begin = next((at for at in range(end, min(most, end + LONGEST_HOLE + 1)) if names[at] in known), most)
        if begin >= most:
            break
        end = begin + 1
        while end < most and names[end] in known:
            end += 1
        found.append((begin, end))
    return tuple(found)


def holes_between(
    names: ChunkNames, first: int, stretches: Sequence[Stretch], page_size: int, namespace: str
) -> list[Hole]:
    """Return what lies before and between stretches of chunks from the chunk ``first`` on, of a namespace."""
    holes, each = [], names.pages_each
    for start, end in stretches:
        if start > first:
            page = start * each
            above = names.identities(page - 1, page) if page else chain_root(namespace)
            holes.append(Hole(start=first * each * page_size, end=page * page_size, above=above))
        first = end
    return holes


def hole_at(run: HiddenRun, position: int) -> Hole | None:
    """Return the hole that a position lies in, if any. Does not mutate."""
    return next((hole for hole in run.holes if hole.start <= position < hole.end), None)


def next_hidden(run: HiddenRun, position: int) -> int:
    """Where hidden states go on at or behind a position: behind the hole that this lies in. Does not mutate."""
    hole = hole_at(run, position)
    return position if hole is None else hole.end


def stretch_end(run: HiddenRun, position: int, end: int) -> int:
    """Where the stretch of a position ends, ``end`` at the latest. Does not mutate."""
    return min([end, *(hole.start for hole in run.holes if hole.start > position)])


def tokens_of_run(run: HiddenRun, start: int, end: int) -> int:
    """Tokens of [start, end) that are in no hole. Does not mutate."""
    inside = sum(max(0, min(hole.end, end) - max(hole.start, start)) for hole in run.holes)
    return max(0, end - start - inside)


def page_at(run: HiddenRun, position: int, page_size: int) -> int:
    """Which of a run's pages holds a position, or the first behind the hole that this lies in. Does not mutate."""
    return tokens_of_run(run, run.depth, position) // page_size


def identity_before(run: HiddenRun) -> bytes:
    """Identity of the page before what a run orders next. Does not mutate."""
    hole = hole_at(run, run.end)
    return hole.above if hole is not None else (run.identities or run.above)[-IDENTITY_BYTES:]


def end_at(run: HiddenRun, position: int) -> None:
    """End a run at a position, and before a hole that lies before it."""
    before = next((hole.start for hole in run.holes if hole.start < position <= hole.end), position)
    run.end = run.goal = max(before, run.depth)
    run.holes = [hole for hole in run.holes if hole.start < run.end]


HIDDEN_FETCH_CHUNKS = 256
"""Chunks of one fetch at the most. Bounds the size of its order and the time until its request gives pages back."""


def hidden_end(storage: Storage, names: ChunkNames, first: int) -> int:
    """Behind the last chunk of a run of hidden states that begins with ``first``. Does not mutate."""
    end, most = first, min(names.count, first + HIDDEN_FETCH_CHUNKS)
    while end < most and names[end] in storage.hidden.chunks:
        end += 1
    return end


class HiddenTier(msgspec.Struct):
    """A storage's pool of hidden states, and those on its disk."""

    pool_bytes: int = 0  # Budget of its hidden pool; 0 is none.
    is_requested: bool = False
    handle: PoolHandle | None = None
    pool: PagePool | None = None
    chunks: dict[bytes, None] = {}  # Hidden states that its disk holds, as far as it said.
    saving: dict[bytes, int] = {}  # Chunks whose hidden states are on their way there, by lease, which may be over.
    shapes: bytes = b""  # Digests of the geometries of the chunks that its disk held when it joined, 8 bytes each.
