"""Chunks that a store was lately found to lack, so that the same miss is not asked again for each request.

Another node may write a chunk at any time, so an absence is believed for a bounded time only. The number of remembered
chunks is bounded too: past it, the oldest note is forgotten, which costs one request.
"""

from __future__ import annotations

from collections import OrderedDict

from services.storage.backends import ChunkKey


class AbsenceCache:
    """Chunks that a store was found to lack. Not thread-safe."""

    def __init__(self, *, max_chunks: int, lifetime_s: float) -> None:
        """Believe an absence for ``lifetime_s`` seconds, and remember at most ``max_chunks`` of them.

        The last ``max_chunks`` chunks that were written or found are remembered, too.
        """
        self._max_chunks = max_chunks
        self._lifetime_s = lifetime_s
        self._absent: OrderedDict[ChunkKey, float] = OrderedDict()  # Time until which the absence is believed.
        self._written: OrderedDict[ChunkKey, float] = OrderedDict()  # Time of a write or find.

    def is_absent(self, key: ChunkKey, now_s: float) -> bool:
        """Return whether the store need not be asked. Forgets outdated notes."""
        until_s = self._absent.get(key)
        if until_s is None:
            return False
        if now_s < until_s:
            return True
        del self._absent[key]
        return False

    def note(self, key: ChunkKey, *, asked_s: float, now_s: float) -> None:
        """Note that the store, asked at ``asked_s``, lacked it.

        An answer to a question from before the chunk was written here is outdated, and is ignored.
        """
        if self._written.get(key, -1.0) >= asked_s:
            return
        self._absent.pop(key, None)
        self._absent[key] = now_s + self._lifetime_s
        if len(self._absent) > self._max_chunks:
            self._absent.popitem(last=False)

    def forget(self, key: ChunkKey, now_s: float) -> None:
        """Note that the store has it: it was written here, or found."""
        self._absent.pop(key, None)
        self._written.pop(key, None)
        self._written[key] = now_s
        if len(self._written) > self._max_chunks:
            self._written.popitem(last=False)
