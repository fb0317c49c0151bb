"""Listing of a store page by page, which continues where a page failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.storage.backends.guarded_calls import Answer
from services.storage.backends.store_calls import StoreCalls
from shared.errors import TransportError

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta


class Listing:
    """A listing that continues behind the last name when a page failed, where the store lists in order."""

    def __init__(self, store: StoreCalls, prefix: str, is_in_order: bool, after: str = "") -> None:
        """Prepare to list names below ``prefix`` ("" is all), behind ``after`` where the store lists in order."""
        self._store = store
        self._prefix = prefix or None
        self._is_in_order = is_in_order
        self._stream: ListStream[Sequence[ObjectMeta]] | None = None
        self._last = after
        self._has_pages = False

    async def next_page(self) -> Answer[Sequence[ObjectMeta]]:
        """Return the next page, empty at the end."""
        if self._stream is None:
            if self._has_pages and not self._is_in_order:
                raise TransportError("a listing of a directory broke off")
            self._stream = self._store.list(self._prefix, self._last or None)
        stream, self._stream = self._stream, None
        page = await self._store.page(stream)
        self._stream = stream
        if page:
            self._has_pages = True
            self._last = page[-1]["path"]
        return Answer("ok", page)
