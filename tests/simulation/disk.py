"""A disk that outlives its storage, with room for so many chunks of KV and as many of hidden states; or an object
store.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages.pools import HIDDEN
from tests.simulation.contents import Copy, Page, WrongContent


class Chunks:
    """Chunks of one form by name, each a copy of its pages. The oldest go when there is no room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[bytes, list[Copy]] = {}

    def put(self, name: bytes, pages: Sequence[Page], identities: Sequence[bytes]) -> list[bytes]:
        """Keep a chunk; returns the names of those that had to go for it, itself where there is no room at all."""
        if name in self.held:
            return []
        self.held[name] = [Copy(claimed, page) for claimed, page in zip(identities, pages, strict=True)]
        dropped = []
        while len(self.held) > self.room:
            dropped.append(next(iter(self.held)))
            del self.held[dropped[-1]]
        return dropped

    def find(self, name: bytes) -> list[Copy] | None:
        """A chunk that verifies. One that does not is quarantined. Raises WrongContent for one that lies."""
        copies = self.held.get(name)
        if copies is None:
            return None
        if any(copy.is_corrupt for copy in copies):
            del self.held[name]
            return None
        if any(copy.page.identity() != copy.claimed for copy in copies) or copies[-1].claimed != name:
            raise WrongContent(f"chunk {name.hex()[:8]} holds other pages than its name says")
        return copies


class Disk:
    """Chunks of KV, of hidden states, and the names of those of KV that are kept a second time to be read in part."""

    def __init__(self, room: int) -> None:
        self.kv = Chunks(room)
        self.hidden = Chunks(room)
        self.sparse: dict[bytes, None] = {}
        self.is_failing = False  # Writes fail: it is full, or read-only.

    def form(self, form: str) -> Chunks:
        """The chunks of a form."""
        return self.hidden if form == HIDDEN else self.kv

    def can_read(self, name: bytes) -> bool:
        """Whether a chunk can be read in part."""
        return name in self.sparse and self.kv.find(name) is not None
