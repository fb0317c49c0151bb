"""Loading and unloading LoRA adapters in a running cell: orders to the scheduler, and waits for the workers' reports.

Every wait is bounded: Unavailable is raised when the scheduler or a worker does not answer in time. An adapter that
some worker cannot load is served by none: the adapter that had the name before, if any, has it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.cache_calls import POLL_S, RETRY_AFTER_MS, CacheCalls
from services.gateway.cell import CellView
from shared.adapters import AdapterFiles
from shared.errors import AdapterRefused, InvalidRequest, NotFound, Unavailable
from shared.ids import new_id
from shared.messages.cell_events import LoadAdapter, UnloadAdapter
from shared.messages.status import AdapterStatus, CellStatus

LOAD_S = 120.0
"""Enough for a worker to finish its step and to read a gigabyte."""

HEAR_S = 5.0
"""The scheduler publishes its status twice a second."""


@dataclass(frozen=True, slots=True)
class AdapterCalls:
    """Adapter orders of one gateway. ``view`` is the gateway's view of its cell, by which it accepts requests."""

    calls: CacheCalls
    view: CellView
    load_s: float = LOAD_S
    hear_s: float = HEAR_S

    async def load(self, name: str, files: AdapterFiles, *, replaces: bool) -> None:
        """Serve an adapter under this name; return when every worker has it and this gateway accepts requests for it.

        Raises InvalidRequest for a name that is taken, unless it ``replaces``, AdapterRefused, Unavailable.
        """
        status = await self.calls.status()
        if not status.workers:
            raise Unavailable("no worker has joined", retry_after_ms=RETRY_AFTER_MS)
        before = _find(status, name)
        if before is not None and not replaces:
            raise InvalidRequest(
                f"the adapter {name!r} is loaded already; load_inplace replaces it",
                param="lora_name",
                code="adapter_exists",
            )
        order = LoadAdapter(name=name, path=str(files.directory), digest=files.digest)
        status = await self.calls.fold(order, new_id("load-adapter"))
        try:
            await self._loaded(status, order)
        except AdapterRefused:
            await self._undo(name, before)
            raise
        await self._heard(lambda: _has(self.view.adapter(name), files.digest))

    async def unload(self, name: str) -> None:
        """Accept no more requests for an adapter; those in progress end normally. Raises NotFound."""
        if _find(await self.calls.status(), name) is None:
            raise NotFound(f"there is no adapter {name[:128]!r}", param="lora_name", code="adapter_not_found")
        await self.calls.fold(UnloadAdapter(name=name), new_id("unload-adapter"))
        await self._heard(lambda: self.view.adapter(name) is None)

    async def _loaded(self, status: CellStatus, order: LoadAdapter) -> None:
        """Wait until all workers have the adapter. Raises AdapterRefused where one cannot."""
        try:
            async with asyncio.timeout(self.load_s):
                while True:
                    adapter = _find(status, order.name)
                    if adapter is None or adapter.digest != order.digest:
                        raise AdapterRefused(
                            "the cell has its maximum of adapters, or another order took the name meanwhile",
                            param="lora_name",
                        )
                    if adapter.faults:
                        worker, fault = next(iter(adapter.faults.items()))
                        raise AdapterRefused(f"{worker} cannot load it: {fault}", param="lora_path")
                    staying = [worker.worker_id for worker in status.workers if not worker.draining]
                    if staying and set(staying) <= set(adapter.workers):
                        return
                    await asyncio.sleep(POLL_S)
                    status = await self.calls.status()
        except TimeoutError as error:
            raise Unavailable(
                f"not all workers have loaded the adapter within {self.load_s:g} s; they continue",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error

    async def _undo(self, name: str, before: AdapterStatus | None) -> None:
        order: LoadAdapter | UnloadAdapter = UnloadAdapter(name=name)
        if before is not None:
            order = LoadAdapter(name=name, path=before.path, digest=before.digest)
        await self.calls.fold(order, new_id("undo-adapter"))

    async def _heard(self, holds: Callable[[], bool]) -> None:
        """Wait until this gateway's own view shows the change, so that its caller's next request is answered by it."""
        try:
            async with asyncio.timeout(self.hear_s):
                while True:
                    if holds():
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unavailable(
                "the order was carried out, but this gateway has no status that shows it: the scheduler is silent",
                retry_after_ms=RETRY_AFTER_MS,
            ) from error


def _find(status: CellStatus, name: str) -> AdapterStatus | None:
    return next((adapter for adapter in status.adapters if adapter.name == name), None)


def _has(adapter: AdapterStatus | None, digest: str) -> bool:
    return adapter is not None and adapter.digest == digest and bool(adapter.workers)
