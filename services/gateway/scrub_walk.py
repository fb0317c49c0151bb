"""Scrubbing the disks of all storages, one bounded call at a time.

A cursor names the storage and the chunk at which the next call continues: ``storage-0:…``.
"""

from __future__ import annotations

from services.gateway.cache_calls import CacheCalls
from services.gateway.openai_schema.cache import VerifyReport, VerifyRequest
from shared.errors import InvalidRequest, NotFound


async def scrub_next(calls: CacheCalls, request: VerifyRequest) -> VerifyReport:
    """Check the next chunks.

    Raises NotFound for a storage that the cell does not have, InvalidRequest for a bad cursor.
    """
    storages = sorted((await calls.status()).storages)
    if request.storage is not None:
        if request.storage not in storages:
            raise NotFound(f"there is no storage {request.storage[:64]!r}", param="storage", code="storage_not_found")
        storages = [request.storage]
    if not storages:
        return VerifyReport(storage=None, checked=0, nbytes=0, bad=[], next_cursor=None)
    storage, _, after = request.cursor.partition(":") if request.cursor else (storages[0], "", "")
    if storage not in storages:
        raise InvalidRequest("the cursor belongs to no requested storage", param="cursor")
    found = await calls.scrub(storage, after=after, max_chunks=request.max_chunks)
    behind = storages[storages.index(storage) + 1 :]
    following = f"{storage}:{found.next_after}" if found.next_after else f"{behind[0]}:" if behind else None
    return VerifyReport(
        storage=storage, checked=found.checked, nbytes=found.nbytes, bad=list(found.bad), next_cursor=following
    )
