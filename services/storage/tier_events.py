"""Events of the tiers for the scheduler, so that its catalogue of the disk agrees with the disk.

Events leave in the order in which these calls are made, and each is made of the index's state at that moment: a chunk
that came and went again between a write and its answer is not claimed, one that went and came back is not reported as
gone. So after the last event the catalogue equals the index, even where events overlapped.
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
    """Sends the events.

    ``forms`` gives the form of each of this cell's geometries by its digest; chunks of other geometries, and those
    whose names stay sealed for lack of a key, are not reported.
    """

    def __init__(
        self, outbox: EventOutbox, is_on_disk: Callable[[ChunkKey], bool], *, storage_id: str, incarnation: str
    ) -> None:
        """Send through ``outbox``; ``is_on_disk`` asks the index, each time that an event is made."""
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

        Evicted chunks may be of another form; those have events of their own. Where the order ``is_compact`` and all of
        its ``chunks`` are there, the answer has no names.
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
        """Report how far a fetch is. Missing chunks of other forms have events of their own."""
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
        """Report which of these are on the disk, in pieces of one form each."""
        await self._tell(ChunksListed, keys, True)

    async def dropped(self, keys: Iterable[ChunkKey]) -> None:
        """Report which of these are not on the disk any more, in pieces of one form each."""
        await self._tell(ChunksDropped, keys, False)

    async def _tell(self, kind: type[ChunksListed | ChunksDropped], keys: Iterable[ChunkKey], is_on_disk: bool) -> None:
        whole = list(keys)
        for start in range(0, len(whole), LISTED_AT_ONCE):
            # A copy, because a form may join while an event waits for room.
            for form in list(self.forms.values()):
                if chunks := self._pack(whole[start : start + LISTED_AT_ONCE], form, is_on_disk):
                    event = kind(storage_id=self._storage_id, incarnation=self._incarnation, chunks=chunks, form=form)
                    await self._outbox.put_when_room(event)

    def _pack(self, keys: Iterable[ChunkKey], form: ChunkForm, is_on_disk: bool) -> bytes:
        return b"".join(
            key.identity
            for key in dict.fromkeys(keys)
            if self.forms.get(key.geometry) == form and not key.is_sealed and self._is_on_disk(key) == is_on_disk
        )

    def _of_others(self, keys: Iterable[ChunkKey], form: ChunkForm) -> list[ChunkKey]:
        return [key for key in keys if self.forms.get(key.geometry) != form]
