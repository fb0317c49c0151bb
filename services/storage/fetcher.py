"""Execution of fetches: chunks of one sequence from disk or object store into host pages, in order, reading ahead.

Reads of one fetch overlap, its writes to the host pool do not: the arrived chunks are always a prefix. A fetch that is
over, cancelled or late begins nothing more; running reads are waited for, since a thread cannot be stopped, and their
results are discarded. So nothing of it is written after its last event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.storage import measures
from services.storage.chunk_source import ChunkSource
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.fetch_progress import FetchProgress
from services.storage.fetch_run import FetchRun
from services.storage.io_threads import IoThreads
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.sharing.lenders import Lenders
from services.storage.sharing.loan_groups import LentGroup
from services.storage.sharing.loan_run import LoanRun
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import InvalidRequest, ThermoclineError
from shared.messages.pools import ChunkForm, form_name
from shared.messages.storage_plans import FetchChunks
from shared.tracing import Tracer

MAX_FETCHES = 1024
"""Fetches of one form that may wait or run; the scheduler bounds them by the pages that it leases to them."""

AT_ONCE = 8
"""Fetches that run at once; more would only take turns at the same threads."""

_log = logs.get_logger("storage")


@dataclass(slots=True)
class _Fetch:
    order: FetchChunks
    chunks: list[FetchChunk]
    progress: FetchProgress
    after: tuple[int, ...]  # Reads of its host pages ordered before it.
    started_s: float
    deadline_s: float
    lent: list[LentGroup]  # Reads from another node; empty where it reads this node's tiers.
    bringing: asyncio.Task[str] | None = None
    ending: str = ""  # Why it was cut off; "" if it was not.


@dataclass(slots=True)
class FetchTotals:
    """Counts since this process started."""

    fetches: int = 0
    failed: int = 0
    disk_chunks: int = 0
    remote_chunks: int = 0
    lent_chunks: int = 0
    nbytes: int = 0


class Fetcher:
    """Fetches of chunks of one form; a few run at once, in order of arrival. Owned by the event loop."""

    def __init__(
        self,
        *,
        form: ChunkForm,
        pools: Pools,
        gate: PageGate,
        source: ChunkSource,
        threads: IoThreads,
        events: TierEvents,
        max_fetches: int = MAX_FETCHES,
        clock_s: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
        lenders: Lenders | None = None,
    ) -> None:
        """Fetch chunks of ``form`` into its pool, from the tiers of ``source`` or another node's host memory.

        ``gate`` guards the pages of that pool. Fetches beyond ``max_fetches`` are refused. ``clock_s`` returns seconds.
        Without a ``tracer`` no spans are recorded; without ``lenders`` fetches from other nodes are refused.
        """
        self.totals = FetchTotals()
        self._form = form
        self._pools = pools
        self._gate = gate
        self._source = source
        self._threads = threads
        self._events = events
        self._max_fetches = max_fetches
        self._clock_s = clock_s
        self._tracer = tracer
        self._lenders = lenders
        self._fetches: dict[int, _Fetch] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(min(AT_ONCE, threads.shares.depth))
        self._stop_reason = ""

    def __len__(self) -> int:
        """Return the number of fetches that wait or run."""
        return len(self._fetches)

    async def add(self, order: FetchChunks) -> None:
        """Queue a fetch. An invalid one is answered at once; one with the id of a fetch under way, by that."""
        if order.fetch_id in self._fetches:
            return
        try:
            chunks = self._pools.check_fetch(order)
            lent = self._lent_of(order, chunks)
        except ThermoclineError as error:
            await self._refuse(order, error.message)
            return
        if len(self._fetches) >= self._max_fetches or self._stop_reason:
            await self._refuse(order, self._stop_reason or f"{self._max_fetches} fetches wait or run already")
            return
        pages = [page for chunk in chunks for page in chunk.host_pages.tolist()]
        now_s = self._clock_s()
        fetch = _Fetch(
            order,
            chunks,
            FetchProgress(len(chunks)),
            self._gate.write_ordered(pages),
            now_s,
            now_s + order.deadline_ms / 1000,
            lent,
        )
        self._fetches[order.fetch_id] = fetch
        measures.FETCHES.inc()
        if order.lender is None:
            self._source.touch(chunks)
        self._tasks[order.fetch_id] = asyncio.create_task(self._run(fetch), name=f"fetch-{order.fetch_id}")

    def cancel(self, fetch_id: int, reason: str = "cancelled") -> None:
        """Begin no further chunk of a fetch; its last event says how far it came. Ignored for one that is over."""
        fetch = self._fetches.get(fetch_id)
        if fetch is None or fetch.ending:
            return
        fetch.ending = reason
        if fetch.bringing is not None:
            fetch.bringing.cancel()

    async def stop(self, reason: str) -> None:
        """Cut every fetch off, and wait until each has been answered."""
        self._stop_reason = reason
        for fetch_id in list(self._fetches):
            self.cancel(fetch_id, reason)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _lent_of(self, order: FetchChunks, chunks: list[FetchChunk]) -> list[LentGroup]:
        """Return a fetch's reads from another node. Raises InvalidRequest for an unusable lender."""
        if order.lender is None:
            return []
        if self._lenders is None:
            raise InvalidRequest("this storage does not read other nodes' memory: --share is off")
        return self._lenders.groups(order.lender, chunks)

    async def _run(self, fetch: _Fetch) -> None:
        error = ""
        if not fetch.ending:
            fetch.bringing = asyncio.create_task(self._bring(fetch))
            left_s = fetch.deadline_s - self._clock_s()
            done, _ = await asyncio.wait({fetch.bringing}, timeout=max(0.0, left_s))
            if not done:
                self.cancel(fetch.order.fetch_id, "its deadline passed")
                await asyncio.wait({fetch.bringing})
            if not fetch.bringing.cancelled():
                caught = fetch.bringing.exception()
                if caught is not None:
                    _log.error("fetch_raised", fetch=fetch.order.fetch_id, exc_info=caught)
                error = fetch.bringing.result() if caught is None else f"{type(caught).__name__}: {caught}"
        if fetch.progress.chunks < fetch.progress.total:
            error = error or fetch.ending
        await self._answer(fetch, error)

    async def _bring(self, fetch: _Fetch) -> str:
        async with self._turns:
            await self._gate.passed(fetch.after)
            run = self._run_of(fetch)
            if isinstance(run, LoanRun):
                begun_s = self._clock_s()
                error = await run.connect()
                # The time of a loan measures the network's speed, so the first connection is left out.
                fetch.started_s += self._clock_s() - begun_s
                if error:
                    return error
            return await run.bring(lambda: self._report(fetch))

    def _run_of(self, fetch: _Fetch) -> FetchRun | LoanRun:
        order, host = fetch.order, self._pools.pool(self._form)

        def left_s() -> float:
            return fetch.deadline_s - self._clock_s()

        if order.lender is not None and self._lenders is not None:
            return LoanRun(self._lenders, order.lender, fetch.lent, fetch.progress, host, left_s=left_s)
        return FetchRun(
            fetch.chunks, fetch.progress, self._source, self._threads, host, key_id=order.key_id, left_s=left_s
        )

    async def _report(self, fetch: _Fetch) -> None:
        seconds = self._clock_s() - fetch.started_s
        await self._events.fetched(
            fetch.order.fetch_id, fetch.progress, form=self._form, is_over=False, seconds=seconds
        )

    async def _answer(self, fetch: _Fetch, error: str) -> None:
        fetch_id, progress = fetch.order.fetch_id, fetch.progress
        del self._fetches[fetch_id]
        measures.FETCHES.dec()
        seconds = self._clock_s() - fetch.started_s
        self.totals.fetches += 1
        self.totals.failed += bool(error)
        self.totals.disk_chunks += progress.disk_chunks
        self.totals.remote_chunks += progress.remote_chunks
        self.totals.lent_chunks += progress.lent_chunks
        self.totals.nbytes += progress.nbytes
        # Reads that were cut off may have found bad chunks too, and a chunk that is bad here may be good in the store.
        progress.missing += self._source.take_lost()
        measures.FETCH_SECONDS.observe(seconds)
        if error and fetch.order.lender is not None:
            lender = fetch.order.lender.storage_id
            _log.warning("loan_failed", fetch=fetch_id, lender=lender, chunks=progress.chunks, reason=error)
        if self._tracer is not None and fetch.order.trace:
            _record(self._tracer, fetch, self._form, seconds, error)
        await self._events.fetched(fetch_id, progress, form=self._form, is_over=True, error=error, seconds=seconds)
        del self._tasks[fetch_id]

    async def _refuse(self, order: FetchChunks, reason: str) -> None:
        self.totals.fetches += 1
        self.totals.failed += 1
        measures.FAILURES.labels("FetchChunks").inc()
        _log.warning("fetch_refused", fetch=order.fetch_id, reason=reason)
        await self._events.fetched(order.fetch_id, FetchProgress(0), form=self._form, is_over=True, error=reason)


def _record(tracer: Tracer, fetch: _Fetch, form: ChunkForm, seconds: float, error: str) -> None:
    """End the span of a fetch for a traced request."""
    ended_ns = time.time_ns()
    attributes: dict[str, str | int | float | bool] = {
        "form": form_name(form),
        "chunks": fetch.progress.chunks,
        "disk_chunks": fetch.progress.disk_chunks,
        "remote_chunks": fetch.progress.remote_chunks,
        "lent_chunks": fetch.progress.lent_chunks,
        "bytes": fetch.progress.nbytes,
        "error": error,
    }
    tracer.record("fetch", fetch.order.trace, ended_ns - round(seconds * 1e9), ended_ns, attributes)
