"""Device pages to pinned host pages for the storage's backups, in the worker's own CUDA context (Strata section 4.2).

Copies of another process would get time slices of the GPU instead of running beside the model's kernels. A mover of its
own, on streams and a thread of its own, leaves loads alone: the link carries both directions at a time. One program of
its kernel takes one multiprocessor, and a batch is bounded, so that the GPU is never far from its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from services.worker.kv.host_pools import HostPools
from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.page_memory import PageNumbers
from shared import logs
from shared.errors import TransportError
from shared.messages.page_stores import PagesStored, StorePages

_log = logs.get_logger("worker")


class HostStores:
    """One thread and its mover. Its methods may be called by any thread."""

    def __init__(
        self,
        mover: PageMover,
        device_pages: int,
        *,
        on_thread: Callable[[], None] | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the thread; ``mover`` is used by it alone. ``on_thread`` is called on the thread first."""
        self._mover = mover
        self._device_pages = device_pages
        self._clock_s = clock_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="stores", initializer=on_thread)

    def begin(self, pools: HostPools, call: StorePages) -> Future[PagesStored]:
        """Copy the pages of ``call``, behind earlier calls. The future has an answer and never raises."""
        return self._threads.submit(self._store, pools, call)

    def behind(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the copying thread, behind the copies so far."""
        self._threads.submit(work)

    def close(self) -> None:
        """Finish the calls so far; no more are begun."""
        self._threads.shutdown(wait=True)

    def _store(self, pools: HostPools, call: StorePages) -> PagesStored:
        device, host = _numbers(call.device_pages), _numbers(call.host_pages)
        try:
            # Looked up on this thread, because it also releases detached pools, behind earlier copies.
            pool = pools.find(call.storage_id)
            memory = pool.memory()
        except TransportError as error:
            return PagesStored(refused=error.message)
        refused = self._fault(pool.view.handle.name, memory.layout.pages, call, device, host)
        if not refused and not memory.is_pinned:
            refused = "the host pool is not pinned"
        if refused or not len(device):
            return PagesStored(refused=refused)
        began_s = self._clock_s()
        try:
            self._mover.store(memory, range(memory.layout.layers), device, host)
        except Exception as error:
            _log.warning("pages_not_stored", storage=call.storage_id, transfer=call.transfer_id, exc_info=error)
            return PagesStored(error=f"{type(error).__name__}: {error}{self._end_copies()}")
        return PagesStored(seconds=self._clock_s() - began_s)

    def _fault(self, pool: str, pages: int, call: StorePages, device: PageNumbers, host: PageNumbers) -> str:
        """Return why nothing can be copied, or ""."""
        if pool != call.pool:
            return f"the host pool is {pool}, not {call.pool}"
        if len(call.device_pages) != len(call.host_pages) or len(call.device_pages) % 4:
            return "the lists of pages differ in length"
        if not len(device):
            return ""
        if min(device.min(), host.min()) < 0 or device.max() >= self._device_pages or host.max() >= pages:
            return "the call names pages outside the pools"
        return "" if len(np.unique(host)) == len(host) else "the call names a host page twice"

    def _end_copies(self) -> str:
        """Wait for all launched copies; return an error, or "".

        Nothing is written after this, as a broken GPU context writes nothing either.
        """
        try:
            self._mover.drain()
        except Exception as error:
            return f"; then {type(error).__name__}: {error}"
        return ""


def _numbers(packed: bytes) -> PageNumbers:
    return np.frombuffer(packed, dtype="<i4", count=len(packed) // 4).astype(np.int32)
