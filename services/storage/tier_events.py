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
from shared.ids import DIGEST_BYTES
from shared.messages.pools import ChunkForm
from shared.messages.storage_events import (
    LISTED_AT_ONCE,
    ChunksDropped,
    ChunksFetched,
    ChunksListed,
    ChunksSaved,
)


class TierEvents:
    """``is_on_disk`` is the index's word. ``forms`` says by its digest what a geometry of this cell holds; chunks of
    other geometries, and those whose names stay sealed for want of a key, are no business of it.
    """

    def __init__(
        self, outbox: EventOutbox, is_on_disk: Callable[[ChunkKey], bool], *, storage_id: str, incarnation: str
    ) -> None:
        self._outbox = outbox
        self._is_on_disk = is_on_disk
        self._storage_id = storage_id
        self._incarnation = incarnation
        self.forms: dict[bytes, ChunkForm] = {}

    async def saved(
        self,
        save_id: int,
        *,
        form: ChunkForm,
        chunks: Iterable[ChunkKey] = (),
        dropped: Iterable[ChunkKey] = (),
        error: str = "",
        nbytes: int = 0,
        seconds: float = 0.0,
        is_compact: bool = False,
    ) -> None:
        """Answer a save: which of ``chunks`` are there, and which of ``dropped`` are not.

        Who had to make room may be of another form; of those there are events of their own. Where the order
        ``is_compact`` and all of its ``chunks`` are there, that is said without their names.
        """
        chunks, dropped = dict.fromkeys(chunks), list(dropped)
        there = self._pack(chunks, form, True)
        is_all = is_compact and 0 < len(chunks) * DIGEST_BYTES == len(there)
        await self._outbox.put_when_room(
            ChunksSaved(
                storage_id=self._storage_id,
                incarnation=self._incarnation,
                save_id=save_id,
                chunks=b"" if is_all else there,
                dropped=self._pack(dropped, form, False),
                error=error[:MAX_ERROR_LENGTH],
                nbytes=nbytes,
                seconds=seconds,
                is_all=is_all,
            )
        )
        await self.dropped(self._of_others(dropped, form))

    async def fetched(
        self,
        fetch_id: int,
        progress: FetchProgress,
        *,
        form: ChunkForm,
        is_over: bool,
        error: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Say how far a fetch is. What it found missing of other forms is told in events of their own."""
        await self._outbox.put_when_room(
            ChunksFetched(
                storage_id=self._storage_id,
                incarnation=self._incarnation,
                fetch_id=fetch_id,
                chunks=progress.chunks,
                is_over=is_over,
                disk_chunks=progress.disk_chunks,
                remote_chunks=progress.remote_chunks,
                lent_chunks=progress.lent_chunks,
                missing=self._pack(progress.missing, form, False),
                error=error[:MAX_ERROR_LENGTH],
                nbytes=progress.nbytes,
                seconds=seconds,
            )
        )
        await self.dropped(self._of_others(progress.missing, form))

    async def listed(self, keys: Iterable[ChunkKey]) -> None:
        """Say which of these the disk holds, in pieces of one form each."""
        for piece in _pieces(keys):
            for form in self._present:
                if chunks := self._pack(piece, form, True):
                    event = ChunksListed(
                        storage_id=self._storage_id, incarnation=self._incarnation, chunks=chunks, form=form
                    )
                    await self._outbox.put_when_room(event)

    async def dropped(self, keys: Iterable[ChunkKey]) -> None:
        """Say which of these the disk holds no more, in pieces of one form each."""
        for piece in _pieces(keys):
            for form in self._present:
                if chunks := self._pack(piece, form, False):
                    event = ChunksDropped(
                        storage_id=self._storage_id, incarnation=self._incarnation, chunks=chunks, form=form
                    )
                    await self._outbox.put_when_room(event)

    @property
    def _present(self) -> list[ChunkForm]:
        # A copy: a form may join while an event waits for room.
        return list(self.forms.values())

    def _pack(self, keys: Iterable[ChunkKey], form: ChunkForm, is_on_disk: bool) -> bytes:
        return b"".join(
            key.identity
            for key in dict.fromkeys(keys)
            if self.forms.get(key.geometry) == form and not key.is_sealed and self._is_on_disk(key) == is_on_disk
        )

    def _of_others(self, keys: Iterable[ChunkKey], form: ChunkForm) -> list[ChunkKey]:
        return [key for key in keys if self.forms.get(key.geometry) != form]


def _pieces(keys: Iterable[ChunkKey]) -> Iterable[list[ChunkKey]]:
    whole = list(keys)
    return (whole[start : start + LISTED_AT_ONCE] for start in range(0, len(whole), LISTED_AT_ONCE))
