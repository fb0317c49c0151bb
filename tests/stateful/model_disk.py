"""Model tiers below host memory: chunks by name, each with the pages that it was made from, and what brings them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.chunks import chunk_names
from shared.messages import storage_plans
from shared.messages.base import unpack_int32
from tests.stateful.model_pages import HostPool, Page, WrongKv


@dataclass
class ModelDisk:
    """A disk with room for so many chunks, which drops its oldest for new ones; or an object store."""

    room: int = 1 << 30
    chunks: dict[bytes, list[Page]] = field(default_factory=dict)

    def put(self, name: bytes, pages: Sequence[Page]) -> list[bytes]:
        """Keep a chunk; returns the names of those that had to go for it."""
        if not self.room or name in self.chunks:
            return []
        dropped = []
        while len(self.chunks) >= self.room:
            dropped.append(next(iter(self.chunks)))
            del self.chunks[dropped[-1]]
        self.chunks[name] = [Page(page.before, list(page.tokens)) for page in pages]
        return dropped


@dataclass
class ModelFetch:
    """A FetchChunks under way. ``done`` chunks of it are in the pool."""

    order: storage_plans.FetchChunks
    pool: HostPool
    pages_each: int
    done: int = 0
    disk_chunks: int = 0
    remote_chunks: int = 0
    lent_chunks: int = 0
    missing: list[bytes] = field(default_factory=list)
    is_cancelled: bool = False

    def step(self, disk: ModelDisk, remote: ModelDisk) -> bool:
        """Bring the next chunk; returns whether there is more to bring."""
        names = chunk_names(self.order.identities, self.pages_each)
        if self.is_cancelled or self.done == len(names):
            return False
        name = names[self.done]
        if name in disk.chunks and any(page.is_corrupt for page in disk.chunks[name]):
            del disk.chunks[name]
        pages = disk.chunks.get(name)
        if pages is None:
            self.missing.append(name)
            pages = remote.chunks.get(name)
            if pages is None:
                return False
            self.remote_chunks += 1
        else:
            self.disk_chunks += 1
        return self._put(pages, len(names))

    def borrow(self, lender: HostPool | None) -> bool:
        """Bring the next chunk from another node's host memory, None where that is gone; returns whether there is more.

        What was promised to stay there must be there; what has rotted does not verify.
        """
        order = self.order
        names = chunk_names(order.identities, self.pages_each)
        if self.is_cancelled or self.done == len(names) or lender is None or order.lender is None:
            return False
        start, pages = self.done * self.pages_each, []
        lent = unpack_int32(order.lender.pages)[start : start + self.pages_each]
        for index, (number, place) in enumerate(zip(lent, self._places(), strict=True), start):
            page = lender.memory.get(number)
            if place >= 0 and (page is None or page.is_corrupt):
                return False
            if place >= 0 and page is not None and page.identity() != order.identities[index * 16 : index * 16 + 16]:
                raise WrongKv(f"page {number} of {order.lender.storage_id} was reused while it was lent")
            pages.append(page or Page(b"", []))
        self.lent_chunks += 1
        return self._put(pages, len(names))

    def _places(self) -> list[int]:
        start = self.done * self.pages_each
        return unpack_int32(self.order.host_pages)[start : start + self.pages_each]

    def _put(self, pages: Sequence[Page], chunks: int) -> bool:
        for place, page in zip(self._places(), pages, strict=True):
            if place >= 0:
                self.pool.memory[place] = Page(page.before, list(page.tokens))
        self.done += 1
        return self.done < chunks
