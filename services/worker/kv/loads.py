"""Host→device loads of one batch: gather, verify, write, layer by layer, while the step computes.

Every page is verified before its bytes can be read by attention: its identity against the plan's, and each
layer's checksum, seeded with that identity, over the staged copy that is then written (see ``PoolHandle``).
A page that fails is not written; the others of its load go on, so that a request keeps what was good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.worker.kv.host_pools import HostPools
from services.worker.kv.layer_gate import LayerGate, LoadRejected
from services.worker.kv.page_writers import STAGED_PAGES, PageWriter
from shared.errors import TransportError
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView
from shared.memory.host_pool import layer_checksum
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.worker_events import LoadFailure
from shared.messages.worker_plans import PageLoad

JOIN_TIMEOUT_S = 60.0
"""Longest wait for a cancelled transfer to notice; past it the worker is broken and must not reuse pages."""


@dataclass(slots=True)
class LoadResult:
    """What became of a batch's loads. ``bad_pages`` are device pages whose KV is not there."""

    failures: list[LoadFailure] = field(default_factory=list)
    failed_requests: list[str] = field(default_factory=list)
    bad_pages: frozenset[int] = frozenset()
    pages: int = 0
    nbytes: int = 0
    started_ns: int = 0
    ended_ns: int = 0


class _Job:
    """One PageLoad on its way. ``wrong`` marks pages that failed, with the first reason."""

    def __init__(self, load: PageLoad, geometry: KvGeometry, device_pages: int) -> None:
        self.load = load
        self.host = np.frombuffer(load.host_pages, dtype="<i4").astype(np.int32)
        self.device = np.frombuffer(load.device_pages, dtype="<i4").astype(np.int32)
        self.wrong = np.zeros(len(self.host), dtype=bool)
        self.reason = ""
        self._geometry = geometry
        self._device_pages = device_pages

    def open(self, pools: HostPools) -> HostPoolView | None:
        """Check everything that can be checked before a byte moves; None if the whole load fails."""
        if len(self.host) != len(self.device) or len(self.load.identities) != len(self.host) * DIGEST_BYTES:
            self.refuse("the load's lists differ in length")
            return None
        try:
            view = pools.find(self.load.storage_id)
        except TransportError as error:
            self.refuse(error.message)
            return None
        if len(self.host) and not (
            0 <= self.host.min() <= self.host.max() < view.handle.pages
            and 0 <= self.device.min() <= self.device.max() < self._device_pages
        ):
            self.refuse("the load names pages outside the pools")
            return None
        wanted = np.frombuffer(self.load.identities, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        self.mark((view.identities[self.host] != wanted).any(axis=1), "identity")
        return view

    def identity(self, index: int) -> bytes:
        return self.load.identities[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def mark(self, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        if wrong.any():
            self.wrong |= wrong
            self.reason = self.reason or reason

    def refuse(self, reason: str) -> None:
        """No page of this load is to be used."""
        self.wrong[:] = True
        self.reason = self.reason or reason

    @property
    def bad_pages(self) -> list[int]:
        """Device pages whose KV is not there."""
        bad = self.device if self.wrong.all() else self.device[self.wrong]
        pages: list[int] = bad.tolist()
        return pages


class BatchTransfer:
    """The loads of one RunBatch. ``run`` is executed by the transfer thread, the rest by the compute thread."""

    def __init__(
        self,
        loads: Sequence[PageLoad],
        pools: HostPools,
        writer: PageWriter,
        geometry: KvGeometry,
        device_pages: int,
        *,
        timeout_s: float,
        clock_ns: Callable[[], int],
    ) -> None:
        self.gate = LayerGate(geometry.layers, timeout_s=timeout_s)
        self._geometry = geometry
        self._writer = writer
        self._clock_ns = clock_ns
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._result = LoadResult(started_ns=clock_ns())
        self._jobs = [_Job(load, geometry, device_pages) for load in loads]
        self._views = [job.open(pools) for job in self._jobs]
        for job in self._jobs:
            if job.reason:
                self.gate.reject(job.reason)

    def run(self) -> None:
        """Load layer after layer; never raises."""
        try:
            for layer in range(self._geometry.layers):
                for job, view in zip(self._jobs, self._views, strict=True):
                    if view is not None:
                        self._load_layer(job, view, layer)
                self.gate.release(layer)
        except Exception as error:
            # Whatever it was, no page of this batch is known to be right.
            for job in self._jobs:
                job.refuse(f"{type(error).__name__}: {error}")
            self.gate.reject(str(error))
        finally:
            self._result.ended_ns = self._clock_ns()
            self._ended.set()

    def finish(self) -> LoadResult:
        """Wait until nothing of this batch is being written any more, and say what failed."""
        try:
            self.gate.wait(self._geometry.layers - 1)
        except LoadRejected:
            # Pages that are good go on to the device, unless it was time itself that ran out.
            if self.gate.overdue:
                self._cancelled.set()
        if not self._ended.wait(JOIN_TIMEOUT_S):
            raise TransportError("a load does not end; its device pages cannot be used again")
        result = self._result
        bad: set[int] = set()
        for job in self._jobs:
            if job.reason:
                result.failures.append(
                    LoadFailure(
                        storage_id=job.load.storage_id,
                        host_pages=pack_int32(job.host[job.wrong]),
                        reason=job.reason,
                    )
                )
                result.failed_requests.append(job.load.request_id)
                bad.update(job.bad_pages)
            result.pages += int((~job.wrong).sum())
        result.bad_pages = frozenset(bad)
        result.nbytes = result.pages * self._geometry.page_bytes
        return result

    def _load_layer(self, job: _Job, view: HostPoolView, layer: int) -> None:
        for start in range(0, len(job.host), STAGED_PAGES):
            if self._cancelled.is_set():
                raise TransportError("the load was given up")
            host = job.host[start : start + STAGED_PAGES]
            rows = self._writer.staging[: len(host)]
            rows[...] = view.pages[:, layer][host]
            sums = view.checksums[host, layer].tolist()
            wrong = np.zeros(len(job.host), dtype=bool)
            for row, expected in enumerate(sums):
                index = start + row
                if not job.wrong[index] and layer_checksum(rows[row], job.identity(index)) != expected:
                    wrong[index] = True
            if wrong.any():
                job.mark(wrong, f"checksum of layer {layer}")
                self.gate.reject(job.reason)
            good = ~job.wrong[start : start + len(host)]
            if good.all():
                self._writer.write(layer, job.device[start : start + len(host)], len(host))
            elif good.any():
                kept = int(good.sum())
                rows[:kept] = rows[good]
                self._writer.write(layer, job.device[start : start + len(host)][good], kept)


class Loads:
    """The worker's loads: its host pools, its writer and the one transfer thread."""

    def __init__(
        self,
        geometry: KvGeometry,
        device_pages: int,
        writer: PageWriter,
        *,
        timeout_s: float,
        clock_ns: Callable[[], int],
        submit: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """``submit`` runs a transfer; by default on a thread of its own."""
        self.pools = HostPools(geometry)
        self._geometry = geometry
        self._device_pages = device_pages
        self._writer = writer
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._threads: ThreadPoolExecutor | None = None
        if submit is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loads")
            submit = self._threads.submit
        self._submit = submit

    def start(self, loads: Sequence[PageLoad]) -> BatchTransfer:
        """Begin to load; the caller finishes the transfer before it starts the next."""
        transfer = BatchTransfer(
            loads,
            self.pools,
            self._writer,
            self._geometry,
            self._device_pages,
            timeout_s=self._timeout_s,
            clock_ns=self._clock_ns,
        )
        self._submit(transfer.run)
        return transfer

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self.pools.close()
