"""What the tiers tell the scheduler, so that its catalogue of the disk is what the disk holds.

Events leave in the order in which these calls are made, and each is made of what the index says at that moment: a chunk
that came and went again between a write and its answer is not claimed, one that went and came back is not
reported as gone. So after the last event the catalogue is the index, whatever overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.storage.backends import ChunkKey
from services.storage.copier import MAX_ERROR_LENGTH
from services.storage.core.fetch_progress import FetchProgress
from shared.event_outbox import EventOutbox
from shared.messages.storage_events import (
    LISTED_AT_ONCE,
    ChunksDropped,
    ChunksFetched,
    ChunksListed,
    ChunksSaved,
)


class TierEvents:
    """``is_on_disk`` is the index's word. Chunks of another geometry than ``geometry`` are no business of this cell."""

    def __init__(
        self, outbox: EventOutbox, is_on_disk: Callable[[ChunkKey], bool], *, storage_id: str, incarnation: str
    ) -> None:
        self._outbox = outbox
        self._is_on_disk = is_on_disk
        self._storage_id = storage_id
        self._incarnation = incarnation
        self.geometry = b""

    async def saved(
        self,
        save_id: int,
        *,
        chunks: Iterable[ChunkKey] = (),
        dropped: Iterable[ChunkKey] = (),
        error: str = "",
        nbytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Answer a save: which of ``chunks`` are there, and which of ``dropped`` are not."""
        await self._outbox.put_when_room(
            ChunksSaved(
                storage_id=self._storage_id,
                incarnation=self._incarnation,
                save_id=save_id,
                chunks=self._pack(chunks, True),
                dropped=self._pack(dropped, False),
                error=error[:MAX_ERROR_LENGTH],
                nbytes=nbytes,
                seconds=seconds,
            )
        )

    async def fetched(
        self, fetch_id: int, progress: FetchProgress, *, is_over: bool, error: str = "", seconds: float = 0.0
    ) -> None:
        """Say how far a fetch is."""
        await self._outbox.put_when_room(
            ChunksFetched(
                storage_id=self._storage_id,
                incarnation=self._incarnation,
                fetch_id=fetch_id,
                chunks=progress.chunks,
                is_over=is_over,
                disk_chunks=progress.disk_chunks,
                remote_chunks=progress.remote_chunks,
                missing=self._pack(progress.missing, False),
                error=error[:MAX_ERROR_LENGTH],
                nbytes=progress.nbytes,
                seconds=seconds,
            )
        )

    async def listed(self, keys: Iterable[ChunkKey]) -> None:
        """Say which of these the disk holds, in pieces."""
        for piece in _pieces(keys):
            chunks = self._pack(piece, True)
            if chunks:
                event = ChunksListed(storage_id=self._storage_id, incarnation=self._incarnation, chunks=chunks)
                await self._outbox.put_when_room(event)

    async def dropped(self, keys: Iterable[ChunkKey]) -> None:
        """Say which of these the disk holds no more, in pieces."""
        for piece in _pieces(keys):
            chunks = self._pack(piece, False)
            if chunks:
                event = ChunksDropped(storage_id=self._storage_id, incarnation=self._incarnation, chunks=chunks)
                await self._outbox.put_when_room(event)

    def _pack(self, keys: Iterable[ChunkKey], is_on_disk: bool) -> bytes:
        return b"".join(
            key.identity
            for key in dict.fromkeys(keys)
            if key.geometry == self.geometry and self._is_on_disk(key) == is_on_disk
        )


def _pieces(keys: Iterable[ChunkKey]) -> Iterable[list[ChunkKey]]:
    whole = list(keys)
    return (whole[start : start + LISTED_AT_ONCE] for start in range(0, len(whole), LISTED_AT_ONCE))
