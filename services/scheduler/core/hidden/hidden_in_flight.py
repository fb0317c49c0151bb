"""Hidden states in flight: those being restored for a request, and those being saved of it. Plain snapshot data.

A run has stretches, the parts of a sequence with hidden states on a disk, and holes between them that are computed. A
turn of a conversation ends within a chunk. The next one computes the rest of that chunk, so no request passes all of it
through the model at once and its hidden states are not saved: each turn leaves a hole. A run of hidden states continues
behind it once the hole's tokens are computed, in chunks as any others. The functions below work on positions in tokens
from the root; pages of a run are packed without its holes.
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
is asked for the first part (``asked``) or has proved to have some (``store``); or no further than its goal."""


class Hole(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a run without hidden states, which are computed. Hidden states lie before or behind."""

    start: int
    end: int
    above: bytes  # Identity of the page before ``end``.


class HiddenRun(msgspec.Struct):
    """Hidden states of a request's tokens [depth, end), less the holes, in flight to its worker.

    More follows up to ``goal`` as pages are given back, for a hidden pool may hold less than a prefix. ``pages``
    (packed, one entry for each page from ``depth`` on, none for holes) are leased pages of the storage's hidden pool;
    those of tokens up to ``arrived`` hold what was fetched. Where ``fetch`` is not 0 the storage still writes to the
    others. A hole counts as arrived once the chunks behind it are being fetched.
    """

    storage_id: str
    fetch: int
    depth: int
    end: int
    arrived: int
    pages: bytes
    identities: bytes  # 16 bytes for each page.
    recomputed: int  # Layers that are computed from tokens.
    kind: str = ""  # Kind of the plan, see :func:`planner.plan_kind`.
    predicted_us: float = 0.0  # Time that the plan predicts; 0 once the run departs from it.
    began_ns: int = 0
    disk_us: float = 0.0  # Time of its finished fetches.
    restored_us: float = 0.0  # Time that its worker took to restore so far.
    chunks: int = 0  # Chunks ordered so far, including those given back.
    goal: int = 0
    above: bytes = b""  # Identity of the last page that was given back.
    holes: list[Hole] = []  # In order, between ``depth`` and ``goal``.
    further: Further = "disk"  # What may be ordered behind ``end``.


class HiddenFetch(UnderWay):
    """A FetchChunks order for hidden states that is not over.

    It is for one request; once that is gone, the pages stay here until the fetch is over.
    """

    fetch_id: int
    storage_id: str
    request_id: str  # "" once no request waits for it.
    timer_id: str
    chunks: int  # Number of chunks ordered.
    pages: bytes = b""  # Freed when it is over, because no request has them any more.
    queued_bytes: float = 0.0  # Bytes of fetches in flight when it was ordered.
    is_question: bool = False  # It names chunks that only the object store may have: no fault if they do not come.
    followers: dict[str, None] = {}  # Other requests that waited for it, because they share its chunks.


class OpenHiddenLease(UnderWay):
    """A HiddenLease, from its order to the worker's ``HiddenSaved``.

    ``names`` are the chunks, 16 bytes each, that are known to be saved under it: no other lease saves them meanwhile.
    ``pages`` are of whole chunks, one behind the other from ``depth`` on. Once it is called off, hidden states saved
    under it are not to be trusted.
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
    request_id: str = ""  # The request that computes them; "" once it left the worker.
    timer_id: str = ""  # Set when the request leaves.
    value: float = 0.0  # Hotness of the sequence when it was last looked up.


class HiddenSave(UnderWay):
    """A SaveChunks order for hidden states, not answered yet; it holds its pages of the hidden pool until then."""

    save_id: int
    storage_id: str
    lease_id: int  # The lease under which a worker wrote the hidden states.
    names: bytes  # 16 bytes each.
    pages: bytes
    timer_id: str


Stretch = tuple[int, int]
"""First and past-the-end position: [start, end)."""

MOST_STRETCHES = 64
"""Stretches at most of one run behind its first. Bounds the planning and the size of a run."""

LONGEST_HOLE = 16
"""Chunks of a hole at most. Bounds the names that are computed of a new prompt."""


def stretches_behind(storage: Storage, names: ChunkNames, end: int, most: int) -> tuple[Stretch, ...]:
    """Return stretches [start, end) of chunks from ``end`` up to ``most`` with hidden states on the disk.

    Changes nothing; O(chunks).
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
    """Return the holes before and between stretches of chunks, from the chunk ``first`` on."""
    holes, each = [], names.pages_each
    for start, end in stretches:
        if start > first:
            page = start * each
            above = names.identities(page - 1, page) if page else chain_root(namespace)
            holes.append(Hole(start=first * each * page_size, end=page * page_size, above=above))
        first = end
    return holes


def hole_at(run: HiddenRun, position: int) -> Hole | None:
    """Return the hole that a position lies in, or None. Changes nothing."""
    return next((hole for hole in run.holes if hole.start <= position < hole.end), None)


def next_hidden(run: HiddenRun, position: int) -> int:
    """Return the first position at or behind this one with hidden states: behind the hole that it lies in.

    Changes nothing.
    """
    hole = hole_at(run, position)
    return position if hole is None else hole.end


def stretch_end(run: HiddenRun, position: int, end: int) -> int:
    """Return where the stretch of a position ends, ``end`` at the latest. Changes nothing."""
    return min([end, *(hole.start for hole in run.holes if hole.start > position)])


def tokens_of_run(run: HiddenRun, start: int, end: int) -> int:
    """Return how many tokens of [start, end) are in no hole. Changes nothing."""
    inside = sum(max(0, min(hole.end, end) - max(hole.start, start)) for hole in run.holes)
    return max(0, end - start - inside)


def page_at(run: HiddenRun, position: int, page_size: int) -> int:
    """Return the index in a run's pages of a position, or of the first page behind the hole it lies in.

    Changes nothing.
    """
    return tokens_of_run(run, run.depth, position) // page_size


def identity_before(run: HiddenRun) -> bytes:
    """Return the identity of the page before the next one that a run orders. Changes nothing."""
    hole = hole_at(run, run.end)
    return hole.above if hole is not None else (run.identities or run.above)[-IDENTITY_BYTES:]


def end_at(run: HiddenRun, position: int) -> None:
    """End a run at a position, or before a hole that ends at or behind it."""
    before = next((hole.start for hole in run.holes if hole.start < position <= hole.end), position)
    run.end = run.goal = max(before, run.depth)
    run.holes = [hole for hole in run.holes if hole.start < run.end]


HIDDEN_FETCH_CHUNKS = 256
"""Chunks of one fetch at most. Bounds the size of its order and the time until its request gives pages back."""


def hidden_end(storage: Storage, names: ChunkNames, first: int) -> int:
    """Return the index behind the last chunk of a row of hidden chunks on the disk from ``first`` on.

    Changes nothing.
    """
    end, most = first, min(names.count, first + HIDDEN_FETCH_CHUNKS)
    while end < most and names[end] in storage.hidden.chunks:
        end += 1
    return end


class HiddenTier(msgspec.Struct):
    """A storage's pool of hidden states, and the hidden states on its disk."""

    pool_bytes: int = 0  # Budget of its hidden pool; 0: no pool.
    is_requested: bool = False
    handle: PoolHandle | None = None
    pool: PagePool | None = None
    chunks: dict[bytes, None] = {}  # Hidden chunks that the storage reported on its disk.
    saving: dict[bytes, int] = {}  # Hidden chunks being saved, and their leases, which may be over.
    shapes: bytes = b""  # Digests of the geometries of the chunks that its disk held when it joined, 8 bytes each.
