"""Loading and unloading LoRA adapters in a running cell: orders to the scheduler, and waits for the workers' reports.

Every wait is bounded: Unavailable is raised when the scheduler or a worker does not answer in time. Each order names
the adapter that it expects under the name, so that of several at once one is carried out and the others are told. An
adapter that some worker cannot load is served by none. A replacement gets the name only when every worker has it:
giving it up leaves the adapter that has the name where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.cache_calls import POLL_S, RETRY_AFTER_MS, CacheCalls
from services.gateway.cell import CellView
from shared.adapters import MOST_ADAPTERS, AdapterFiles
from shared.errors import AdapterRefused, CallerError, InvalidRequest, NotFound, Unavailable
from shared.ids import new_id
from shared.messages.cell_events import LoadAdapter, UnloadAdapter
from shared.messages.status import AdapterReplacement, AdapterStatus, CellStatus

LOAD_S = 120.0
"""Enough for a worker to finish its step and to read a gigabyte."""

ROOM_S = 10.0
"""Time in which an unloaded adapter may make room. A replaced one stays for five seconds, and with longer requests."""

HEAR_S = 5.0
"""The scheduler publishes its status twice a second."""


class AdapterConflict(CallerError):
    """Another order about the same name came in between; the message says what it did (409)."""

    code, status = "adapter_conflict", 409


class NoRoomYet(Unavailable):
    """An adapter that is not served any more is still in the place of the new one."""


@dataclass(frozen=True, slots=True)
class AdapterCalls:
    """Adapter orders of one gateway. ``view`` is the gateway's view of its cell, by which it accepts requests."""

    calls: CacheCalls
    view: CellView
    load_s: float = LOAD_S
    room_s: float = ROOM_S
    hear_s: float = HEAR_S

    async def load(self, name: str, files: AdapterFiles, *, replaces: bool) -> None:
        """Serve an adapter under this name; return when every worker has it and this gateway accepts requests for it.

        Where it has the name already, and a worker could not load it, that worker tries again. Raises InvalidRequest
        for a name that is taken, unless it ``replaces``, AdapterConflict, AdapterRefused, Unavailable.
        """
        status = await self.calls.status()
        if not status.workers:
            raise Unavailable("no worker has joined", retry_after_ms=RETRY_AFTER_MS)
        before = _find(status, name)
        is_same = before is not None and before.digest == files.digest
        if before is not None and not replaces and not (is_same and before.faults):
            raise _taken(name)
        expects = before.digest if before is not None else ""
        order = LoadAdapter(name=name, path=str(files.directory), digest=files.digest, expects=expects)
        status = await self.calls.fold(order, new_id("load-adapter"))
        try:
            seq = await self._loaded(status, order, replaces=replaces)
        except (AdapterRefused, NoRoomYet):
            if not is_same:
                undo = UnloadAdapter(name=name, digest=files.digest)
                await self.calls.fold(undo, new_id("undo-adapter"))
            raise
        if not await self._heard(seq, lambda: _has(self.view.adapter(name), files.digest)):
            raise _conflict(name)

    async def unload(self, name: str) -> None:
        """Accept no more requests for an adapter; those in progress end normally. Raises NotFound."""
        if _find(await self.calls.status(), name) is None:
            raise NotFound(f"there is no adapter {name[:128]!r}", param="lora_name", code="adapter_not_found")
        status = await self.calls.fold(UnloadAdapter(name=name), new_id("unload-adapter"))
        await self._heard(status.seq, lambda: self.view.adapter(name) is None)

    async def _loaded(self, status: CellStatus, order: LoadAdapter, *, replaces: bool) -> int:
        """Wait until all workers have the adapter and it has the name; return the status's sequence number.

        Raises AdapterRefused where a worker cannot load it, NoRoomYet where it has no room for longer than ``room_s``,
        and AdapterConflict or InvalidRequest where the order was refused or overtaken by another.
        """
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.load_s):
                while True:
                    adapter = _find(status, order.name)
                    is_named = adapter is not None and adapter.digest == order.digest
                    if is_named and order.expects not in ("", order.digest):
                        return status.seq  # The name moved because every worker had the adapter.
                    loading = _loading(status, order, replaces=replaces)
                    for worker, fault in loading.faults.items():
                        raise AdapterRefused(f"{worker} cannot load it: {fault}", param="lora_path")
                    waited_s = asyncio.get_running_loop().time() - begun_s
                    for worker, wait in loading.room_waits.items() if waited_s >= self.room_s else ():
                        raise NoRoomYet(f"{worker} has no room yet: {wait}", retry_after_ms=RETRY_AFTER_MS)
                    staying = {worker.worker_id for worker in status.workers if not worker.draining}
                    if is_named and staying and staying <= set(loading.workers):
                        return status.seq
                    await asyncio.sleep(POLL_S)
                    status = await self.calls.status()
        except TimeoutError as error:
            raise Unavailable(
                f"not all workers have loaded the adapter within {self.load_s:g} s; they continue",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error

    async def _heard(self, seq: int, holds: Callable[[], bool]) -> bool:
        """Wait until this gateway's own view shows the change, so that its caller's next request is answered by it.

        Return whether it does: the view may already show what a later order made of it. Raises Unavailable where the
        view does not get as far as ``seq``, the status that had the change.
        """
        try:
            async with asyncio.timeout(self.hear_s):
                while True:
                    if self.view.status is not None and self.view.status.seq >= seq:
                        return holds()
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unavailable(
                "the order was carried out, but this gateway has no status that shows it: the scheduler is silent",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error


def _loading(status: CellStatus, order: LoadAdapter, *, replaces: bool) -> AdapterStatus | AdapterReplacement:
    """Return the adapter of an order, which has the name or is to get it.

    Raises AdapterConflict or InvalidRequest where another has it, and AdapterRefused where there are too many.
    """
    adapter = _find(status, order.name)
    if adapter is not None and adapter.digest == order.digest:
        return adapter
    if adapter is not None and adapter.replacement is not None and adapter.replacement.digest == order.digest:
        return adapter.replacement
    if adapter is None and order.expects == "" and len(status.adapters) >= MOST_ADAPTERS:
        raise AdapterRefused(f"the cell has its maximum of {MOST_ADAPTERS} adapters", param="lora_name")
    raise _conflict(order.name) if replaces or adapter is None else _taken(order.name)


def _taken(name: str) -> InvalidRequest:
    text = f"the adapter {name!r} is loaded already; load_inplace replaces it"
    return InvalidRequest(text, param="lora_name", code="adapter_exists")


def _conflict(name: str) -> AdapterConflict:
    return AdapterConflict(f"another order about the adapter {name!r} came in between", param="lora_name")


def _find(status: CellStatus, name: str) -> AdapterStatus | None:
    return next((adapter for adapter in status.adapters if adapter.name == name), None)


def _has(adapter: AdapterStatus | None, digest: str) -> bool:
    return adapter is not None and adapter.digest == digest and bool(adapter.workers)
