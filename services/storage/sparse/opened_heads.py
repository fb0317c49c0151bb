"""Headers and tables of the copies that were read lately, verified and opened: each layer of a request needs them."""

from __future__ import annotations

from collections import OrderedDict

from services.storage.backends import ChunkKey
from services.storage.sparse.part_reading import Opened

MAX_BYTES = 128 * 2**20
"""Tables of about 30 KB a chunk (32 layers, blocks of two tokens), as many as prompts of 250,000 tokens have."""


class OpenedHeads:
    """The headers and tables that were used last, within a bound. Owned by the event loop.

    Copies are put and asked for only in a turn of ``ChunkTurns``, and a writer forgets its copy in its turn: what
    is here is what the file says.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Begin empty; beyond ``max_bytes`` bytes in all, the least recently used ones are dropped."""
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._opened: OrderedDict[ChunkKey, Opened] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of copies whose header and tables are held."""
        return len(self._opened)

    def get(self, key: ChunkKey, key_id: str) -> Opened | None:
        """Open what was read of a copy that is sealed with this key ("" is none)."""
        opened = self._opened.get(key)
        if opened is None or opened.header.key_id != key_id:
            return None
        self._opened.move_to_end(key)
        return opened

    def put(self, key: ChunkKey, opened: Opened) -> None:
        """Remember it, and let those go that were not used for longest."""
        self.forget(key)
        self._opened[key] = opened
        self.nbytes += opened.nbytes
        while self.nbytes > self._max_bytes:
            _, oldest = self._opened.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def forget(self, key: ChunkKey) -> None:
        """Its file changed, or is gone."""
        opened = self._opened.pop(key, None)
        if opened is not None:
            self.nbytes -= opened.nbytes
