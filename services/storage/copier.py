"""Execution of queued transfers; each is answered with ``BackupDone``.

A worker on a GPU copies by itself when it is asked (``worker_backups``), all others are copied from by I/O threads.
These run at low priority: no request waits for a backup, and on full cores an unhindered one halves the speed of the
model (``infra/adr/0003-storage-drives-backups.md``).
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.storage import measures
from services.storage.core.backup_check import Transfer
from services.storage.core.transfer_queue import Ended, TransferQueue
from services.storage.mover import copy_transfer
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.thread_priority import lower_priority
from services.storage.worker_backups import InDoubt, WorkerBackups
from shared import logs
from shared.errors import ThermoclineError
from shared.event_outbox import EventOutbox
from shared.messages.storage_events import BackupDone

MAX_ERROR_LENGTH = 500

_log = logs.get_logger("storage")


@dataclass(slots=True)
class CopyTotals:
    """Counts since this process started."""

    transfers: int = 0
    failed: int = 0
    pages: int = 0
    nbytes: int = 0


class Copier:
    """Runs ``threads`` copies at a time. ``run`` ends after :meth:`stop`, when the running copies have ended."""

    def __init__(
        self,
        queue: TransferQueue,
        pools: Pools,
        outbox: EventOutbox,
        gate: PageGate,
        *,
        storage_id: str,
        incarnation: str,
        threads: int,
        workers: WorkerBackups | None = None,
    ) -> None:
        """Prepare; ``workers`` asks workers to copy by themselves where they can."""
        self._workers = workers
        self._doubts: set[asyncio.Task[None]] = set()
        self._queue = queue
        self._pools = pools
        self._gate = gate
        self._outbox = outbox
        self._storage_id = storage_id
        self._incarnation = incarnation
        self._threads = threads
        self._changed = asyncio.Condition()
        self._stopping = False
        self.totals = CopyTotals()

    async def wake(self) -> None:
        """Start waiting transfers, after one was queued."""
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """Start no more copies. The caller revokes the waiting transfers."""
        self._stopping = True
        await self.wake()

    async def run(self) -> None:
        """Copy until :meth:`stop`, in ``threads`` threads of low priority; pages in doubt are left to the end."""
        executor = ThreadPoolExecutor(self._threads, thread_name_prefix="copy", initializer=lower_priority)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._threads):
                    group.create_task(self._copy_all(executor))
        finally:
            # Pages that a worker may still write to go with the pool.
            for doubt in self._doubts:
                doubt.cancel()
            await asyncio.gather(*self._doubts, return_exceptions=True)
            executor.shutdown(wait=False)

    async def answer(self, ended: Ended, seconds: float = 0.0) -> None:
        """Tell the scheduler how a transfer ended."""
        measures.TRANSFERS.set(len(self._queue))
        if ended.ok:
            self.totals.transfers += 1
            self.totals.pages += len(ended.transfer)
        await self.answer_error(ended.transfer.transfer_id, ended.reason, seconds)

    async def answer_error(self, transfer_id: int, error: str, seconds: float = 0.0) -> None:
        """Answer a backup with ``error``, or as done if it is ""."""
        if error:
            self.totals.failed += 1
            measures.FAILURES.labels("BackupPages").inc()
            _log.warning("backup_failed", transfer=transfer_id, reason=error)
        await self._outbox.put_when_room(
            BackupDone(
                storage_id=self._storage_id,
                incarnation=self._incarnation,
                transfer_id=transfer_id,
                ok=not error,
                error=error[:MAX_ERROR_LENGTH],
                seconds=seconds,
            )
        )

    async def _copy_all(self, executor: ThreadPoolExecutor) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._stopping or self._queue.waiting > 0)
                transfer = None if self._stopping else self._queue.start()
            if transfer is None:
                return
            await self._copy(executor, transfer)

    async def _copy(self, executor: ThreadPoolExecutor, transfer: Transfer) -> None:
        await self._gate.passed(transfer.after)
        started = time.perf_counter()
        error, nbytes = "", 0
        try:
            device = self._pools.device_handle(transfer.worker_id, transfer.worker_incarnation)
            copied = None
            if self._workers is not None:
                copied = await self._workers.copy(transfer, device, self._pools.host, executor)
            if isinstance(copied, InDoubt):
                # Its turn ends here, so that other backups go on, although the copy has not ended.
                task = asyncio.create_task(self._end_when_settled(transfer, copied, started))
                self._doubts.add(task)
                task.add_done_callback(self._doubts.discard)
                return
            nbytes = copied or 0
            if copied is None:
                source = self._pools.device(transfer.worker_id, transfer.worker_incarnation)
                nbytes = await asyncio.get_running_loop().run_in_executor(
                    executor, copy_transfer, transfer, source, self._pools.host
                )
        except Exception as caught:
            # After any error its pages must not be used, and the other transfers go on.
            error = caught.message if isinstance(caught, ThermoclineError) else f"{type(caught).__name__}: {caught}"
            _log.warning("copy_raised", transfer=transfer.transfer_id, exc_info=caught)
        await self._end(transfer, error, started, nbytes)

    async def _end_when_settled(self, transfer: Transfer, doubt: InDoubt, started: float) -> None:
        assert self._workers is not None
        await self._workers.settle(doubt)
        await self._end(transfer, f"worker {transfer.worker_id} did not answer in time", started, 0)

    async def _end(self, transfer: Transfer, error: str, started: float, nbytes: int) -> None:
        """Answer and count a transfer; nothing of it is written any more."""
        seconds = time.perf_counter() - started
        ended = self._queue.finish(transfer.transfer_id, error)
        if ended.ok:
            self.totals.nbytes += nbytes
            measures.COPIED_BYTES.labels(measures.DEVICE_TO_HOST).inc(nbytes)
            measures.COPY_LATENCY.labels(measures.DEVICE_TO_HOST).observe(seconds)
        await self.answer(ended, seconds)
