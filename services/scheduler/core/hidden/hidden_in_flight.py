"""State on its way: what is being restored for a request, and what is being saved of it. Plain data of a snapshot."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.scheduler.core.tiers.under_way import UnderWay

Further = Literal["disk", "asked", "store", "goal"]
"""How a run of state goes on: as far as the disk is known to have it; as far as the object store has it, which is being
asked for the first of it (``asked``) or has proved to have some (``store``); or no further than its goal."""


class Hole(msgspec.Struct, frozen=True):
    """Tokens [start, end) of which a run has no state, with state before or behind them. They are computed."""

    start: int
    end: int
    above: bytes  # Identity of the page before ``end``.


class HiddenRun(msgspec.Struct):
    """State of a request's tokens [depth, end) on its way from below host memory to its worker, less its holes.

    More of it follows up to ``goal`` as its pages come back, for a state pool may hold less than a prefix.
    ``pages`` (packed, one entry a page from ``depth`` on, none for holes) are leased pages of the storage's state pool;
    those of tokens up to ``arrived`` hold what was fetched. Where ``fetch`` is not 0 the storage still writes to the
    others. A hole counts as arrived once what is behind it is being fetched.
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


class FetchedKv(msgspec.Struct):
    """KV that was fetched for a request and is to be loaded: what both should take, and what the first part took."""

    tokens: int
    predicted_us: float
    disk_us: float


class HiddenFetch(UnderWay):
    """A FetchChunks of state that is not over. It is for one request; once that is gone its pages wait for the end."""

    fetch_id: int
    storage_id: str
    request_id: str  # "" once nobody waits for it.
    timer_id: str
    chunks: int  # Ordered.
    pages: bytes = b""  # To be given back when it is over, because no request has them any more.
    queued_bytes: float = 0.0  # Of other fetches, when it was ordered.
    is_question: bool = False  # It names chunks that only the object store may have: no fault if they do not come.
    followers: dict[str, None] = {}  # Others that waited for it at some time, because they share what it brings.


class HiddenLease(UnderWay):
    """A StateLease, from its order to the worker's ``StateSaved``.

    ``names`` are the chunks, 16 bytes each, of which it is known that they are being saved under it: nobody else saves
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
    """A SaveChunks of state that the storage has not answered. It holds its pages of the state pool until then."""

    save_id: int
    storage_id: str
    lease_id: int  # Of the lease under which the state was saved.
    names: bytes  # 16 bytes each.
    pages: bytes
    timer_id: str
