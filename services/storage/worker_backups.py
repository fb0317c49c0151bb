"""Backups whose bytes the worker copies, in large parts; this storage seals each part while the next is copied.

A page is cleared before the worker is asked and sealed after it has answered: a concurrent reader finds no identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from services.storage.copy_share import CopyShare
from services.storage.core.backup_check import Transfer
from services.storage.worker_stores import Outcome, WorkerStores
from shared.memory.host_pool import HostPoolView
from shared.messages.base import pack_int32
from shared.messages.page_stores import StorePages
from shared.messages.pools import PoolHandle

PART_BYTES = 256 * 2**20
"""Bytes copied by one call: 5 to 10 ms of a link, and a hundred times the time of a call."""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A call without an answer: the worker may still write to its pages."""

    worker_id: str
    call: StorePages


class WorkerBackups:
    """Backups by workers. Owned by the event loop."""

    def __init__(
        self,
        stores: WorkerStores,
        storage_id: str,
        incarnation: str,
        share: CopyShare | None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Prepare; ``share`` bounds the part of the time spent copying."""
        self._stores, self._share, self._part_bytes = stores, share, part_bytes
        self._storage_id, self._incarnation = storage_id, incarnation

    async def copy(
        self, transfer: Transfer, device: PoolHandle, target: HostPoolView, threads: Executor
    ) -> int | InDoubt | None:
        """Have the worker copy a transfer; return its bytes when every page is there and sealed in ``threads``.

        Return None where the worker does not copy and writes nothing any more, and InDoubt where it did not answer.
        Raises TransportError when its copy failed.
        """
        probe = StorePages(
            worker_incarnation=transfer.worker_incarnation,
            storage_id=self._storage_id,
            storage_incarnation=self._incarnation,
            pool=target.handle.name,
            transfer_id=transfer.transfer_id,
        )
        if not await self._stores.serves(transfer.worker_id, device, probe):
            return None
        target.clear(transfer.host_pages)
        sealing: asyncio.Future[None] | None = None
        try:
            for number, part in enumerate(self._parts(transfer, target)):
                call = msgspec.structs.replace(
                    probe,
                    part=number,
                    device_pages=pack_int32(transfer.device_pages[part].tolist()),
                    host_pages=pack_int32(transfer.host_pages[part].tolist()),
                )
                outcome = await self._store(transfer.worker_id, call, threads)
                if outcome != "stored":
                    return None if outcome == "refused" else InDoubt(transfer.worker_id, call)
                if sealing is not None:
                    await sealing
                sealing = asyncio.get_running_loop().run_in_executor(threads, _seal, target, transfer, part)
            if sealing is not None:
                await sealing
        finally:
            if sealing is not None and not sealing.done():
                # The end of this backup is not announced while a thread still writes identities.
                await asyncio.wait({sealing})
        return len(transfer) * target.geometry.page_bytes

    async def settle(self, doubt: InDoubt) -> None:
        """Return when nothing of the call is written any more."""
        await self._stores.settle(doubt.worker_id, doubt.call)

    async def _store(self, worker_id: str, call: StorePages, threads: Executor) -> Outcome:
        if self._share is None:
            return await self._stores.store(worker_id, call)
        loop, outcomes = asyncio.get_running_loop(), list[Outcome]()

        def copy() -> None:
            outcomes.append(asyncio.run_coroutine_threadsafe(self._stores.store(worker_id, call), loop).result())

        await loop.run_in_executor(threads, self._share.run, copy)
        return outcomes[0]

    def _parts(self, transfer: Transfer, target: HostPoolView) -> Iterator[slice]:
        step = max(1, self._part_bytes // target.geometry.page_bytes)
        for start in range(0, len(transfer), step):
            yield slice(start, min(start + step, len(transfer)))


def _seal(target: HostPoolView, transfer: Transfer, part: slice) -> None:
    for page, identity in zip(transfer.host_pages[part].tolist(), transfer.identities[part], strict=True):
        target.seal_page(page, identity)
