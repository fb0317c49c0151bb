"""What an object store answered when it was asked for chunks: plain data of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.messages.pools import HIDDEN

if TYPE_CHECKING:
    from shared.messages.pools import ChunkForm


class StoreLacks(msgspec.Struct):
    """Tokens of one request from which on the object store has nothing, by form; -1 is not known."""

    kv_from: int = -1
    hidden_from: int = -1

    def is_known(self, form: ChunkForm, start: int) -> bool:
        """Whether the store has nothing from token ``start`` on. Does not mutate."""
        lacking_from = self.hidden_from if form == HIDDEN else self.kv_from
        return 0 <= lacking_from <= start

    def note(self, form: ChunkForm, start: int) -> None:
        """The store was asked for the request's prefix, or for what it shares with another, and had it up to here."""
        if form == HIDDEN:
            self.hidden_from = start
        else:
            self.kv_from = start


class StoreBlanks(msgspec.Struct):
    """Requests in a row for which an object store was asked for nothing, or was not asked any more, by form."""

    kv: int = 0
    hidden: int = 0

    def of(self, form: ChunkForm) -> int:
        """How many in a row. Does not mutate."""
        return self.hidden if form == HIDDEN else self.kv

    def note_nothing(self, form: ChunkForm) -> None:
        """A question was in vain."""
        if form == HIDDEN:
            self.hidden += 1
        else:
            self.kv += 1

    def note_something(self, form: ChunkForm) -> None:
        """The store has chunks in this form: it is worth asking."""
        if form == HIDDEN:
            self.hidden = 0
        else:
            self.kv = 0
