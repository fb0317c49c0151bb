"""Hidden states in a model cell: what a model worker saves of a sequence under a lease, and what it restores.

A hidden page holds tokens as a page of KV does, for its KV depends on nothing else; so a page that is not what it is
taken for is seen when it is saved, fetched or restored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from shared.chunks import chunk_pages, chunk_tokens
from shared.messages import worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.pools import KvGeometry
from tests.stateful.model_pages import HostPool, Page, WrongKv, geometry

COSTS = worker_events.RestorationCosts(
    hidden=1, hidden_us=0.001, token_us=1_000.0, pair_us=0.0, link_bytes_per_us=1_000.0
)
"""Of a worker to which restoring from hidden states is worth it whatever the disk."""


def hidden_geometry(page_size: int) -> KvGeometry:
    """The geometry of every hidden pool of a model cell: its only layer as hidden states."""
    return structs.replace(geometry(page_size), hidden=1, from_hidden=1)


@dataclass
class Saving:
    """What a lease has brought so far. Tokens from its depth on are captured one behind the other, up to ``end``."""

    lease: plans.HiddenLease
    pool: HostPool | None
    page_size: int
    pages: list[int] = field(default_factory=list)
    above: bytes = b""
    end: int = 0
    waiting: list[int] = field(default_factory=list)  # Captured, and not a whole chunk yet.
    tokens: list[int] = field(default_factory=list)  # Of the chunks that are sealed.

    def __post_init__(self) -> None:
        self.pages = unpack_int32(self.lease.pages)
        self.above, self.end = self.lease.parent, self.lease.depth
        assert self.lease.depth % chunk_tokens(self.page_size) == 0, "a lease begins within a chunk"
        self.extend(b"")

    def extend(self, pages: bytes) -> None:
        """More pages."""
        self.pages += unpack_int32(pages)
        assert self.pages, "a lease of nothing"
        assert len(self.pages) % chunk_pages(self.page_size) == 0, "a lease is not of whole chunks"
        assert len(set(self.pages)) == len(self.pages), "a page is in one lease twice"

    def capture(self, start: int, tokens: list[int]) -> None:
        """These tokens, from ``start`` on, were computed: chunks that they complete are written down."""
        if not start <= self.end < start + len(tokens):
            return  # What comes after a gap is of no use.
        self.waiting += tokens[self.end - start :]
        self.end = start + len(tokens)
        size, each = chunk_tokens(self.page_size), chunk_pages(self.page_size)
        while len(self.waiting) >= size and len(self.tokens) < len(self.pages) * self.page_size:
            first = len(self.tokens) // self.page_size
            for index, place in enumerate(self.pages[first : first + each]):
                page = Page(self.above, self.waiting[index * self.page_size : (index + 1) * self.page_size])
                self.above = page.identity()
                if self.pool is not None:
                    self.pool.memory[place] = page
            self.tokens += self.waiting[:size]
            del self.waiting[:size]

    def answer(self, worker_id: str, incarnation: str) -> worker_events.HiddenSaved:
        """What to say when the sequence ends."""
        tokens = self.tokens if self.pool is not None else []
        return worker_events.HiddenSaved(
            worker_id=worker_id,
            incarnation=incarnation,
            lease_id=self.lease.lease_id,
            chunks=len(tokens) // chunk_tokens(self.page_size),
            tokens=pack_int32(tokens),
        )


def restored_tokens(restore: plans.RestoreChunk, pool: HostPool | None, page_size: int) -> list[int] | None:
    """The tokens that a restoration finds in its hidden pages; None where one of them has rotted or is gone."""
    pages = unpack_int32(restore.hidden_pages)
    assert restore.end - restore.start == len(pages) * page_size, "a restoration has another number of pages"
    assert restore.start % page_size == 0, "a restoration begins within a page"
    assert len(restore.identities) == 16 * len(pages)
    tokens: list[int] = []
    for index, place in enumerate(pages):
        page = pool.memory.get(place) if pool is not None else None
        if pool is None or (page is not None and page.is_corrupt):
            return None
        if page is None or page.identity() != restore.identities[index * 16 : (index + 1) * 16]:
            raise WrongKv(f"hidden page {place} holds {page}, which is not what was to be restored")
        tokens += page.tokens
    return tokens
