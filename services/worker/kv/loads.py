"""Loads of one batch, from host pools and from neighbours: layer by layer, while the step computes.

One transfer thread makes all copies, so a mover has one user. It takes the loads of a batch layer by layer, releasing
each layer at the gate. On a GPU the next layer is launched before the thread waits for the last, so the link never
idles, and a layer is released when its bytes have arrived and were verified: the gate and the bubble see actual
arrivals. A wrong page closes the gate before its layer is released. Its bytes may be on the device by then, and those
of the next layer in flight, which does no harm: the scheduler undoes the load as a whole (``lost_pages``). Promotions,
which no request waits for, get that thread piece by piece when no load wants it (see ``promotions``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from services.worker.kv.host_pools import HostPools, Pins
from services.worker.kv.host_stores import HostStores
from services.worker.kv.layer_gate import LayerGate, LoadRejected
from services.worker.kv.movers.protocol import Fence, PageMover
from services.worker.kv.neighbour_copy import NeighbourCopy
from services.worker.kv.neighbours import Neighbours
from services.worker.kv.page_order import PageCopy
from services.worker.kv.promotions import Promoted, Promotions
from services.worker.kv.verification import Verification
from services.worker.kv.verified_copy import VerifiedCopy
from shared.errors import TransportError
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.worker_events import LoadFailure
from shared.messages.worker_plans import PageLoad, PromotePages

JOIN_TIMEOUT_S = 60.0
"""Longest wait for a cancelled transfer to notice; past it the worker is broken and must not reuse pages."""


@dataclass(slots=True)
class LoadResult:
    """Outcome of a batch's loads.

    ``lost_pages`` are all device pages of loads that failed: the scheduler undoes such a load as a whole, so no request
    may count even on those of its pages that were good.
    """

    failures: list[LoadFailure] = field(default_factory=list)
    failed_requests: list[str] = field(default_factory=list)
    lost_pages: frozenset[int] = frozenset()
    pages: int = 0  # Pages written and, where that was wanted, verified.
    nbytes: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    waited_ns: int = 0  # Time that the computing thread waited, at the gate or for the end of the loads.

    @property
    def load_ns(self) -> int:
        """Wall time from the start of the loads to their end."""
        return max(0, self.ended_ns - self.started_ns)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the loads of a batch are. Times in ns, ``layers`` and ``released`` in layers."""

    layers: int
    pages: int
    released: int
    released_after_ns: int  # From the start to the last release, 0 before any.
    since_ns: int  # Time since the last release.
    is_rejected: bool
    has_ended: bool  # Nothing is being written any more.


class BatchTransfer:
    """The loads of one RunBatch. ``run`` is executed by the transfer thread, the rest by the compute thread."""

    def __init__(
        self,
        loads: Sequence[PageLoad],
        copies: Sequence[PageCopy],
        mover: PageMover,
        geometry: KvGeometry,
        *,
        timeout_s: float,
        clock_ns: Callable[[], int],
    ) -> None:
        """Prepare; ``copies`` are those of ``loads``, opened."""
        self.gate = LayerGate(timeout_s=timeout_s, clock_ns=clock_ns)
        self._geometry = geometry
        self._mover = mover
        self._clock_ns = clock_ns
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._result = LoadResult(started_ns=clock_ns())
        self._loads = loads
        self._copies = copies
        for copy in copies:
            self._note_wrong(copy)

    def run(self) -> None:
        """Load layer after layer; never raises."""
        try:
            self._load_layers()
            for copy in self._copies:
                copy.confirm()
                self._note_wrong(copy)
        except Exception as error:
            self._refuse_all(f"{type(error).__name__}: {error}")
        finally:
            self._drain()
            self._result.ended_ns = self._clock_ns()
            self._ended.set()

    def _load_layers(self) -> None:
        """Launch each layer, then release the one before it when it has arrived."""
        launched: tuple[int, Fence] | None = None
        for layer in range(self._geometry.layers):
            for copy in self._copies:
                if copy.is_open:
                    self._load_layer(copy, layer)
            fence = self._mover.fence()
            if launched is not None:
                self._release(*launched)
            launched = None if fence is None else (layer, fence)
            if fence is None:
                self._declare(layer)
        if launched is not None:
            self._release(*launched)

    def _release(self, layer: int, fence: Fence) -> None:
        fence.synchronize()
        self._declare(layer)

    def _declare(self, layer: int) -> None:
        """Release a layer that has arrived. Every wrong page in it has closed the gate before."""
        for copy in self._copies:
            copy.judge(layer)
            self._note_wrong(copy)
        self.gate.release(layer)

    def _drain(self) -> None:
        """Wait until no copy is writing any more."""
        try:
            self._mover.drain()
        except Exception as error:  # An error of the device: none of its copies can be relied on.
            self._refuse_all(f"{type(error).__name__}: {error}")

    def _refuse_all(self, reason: str) -> None:
        """Refuse all pages of this batch: after such an error none is known to be right."""
        for copy in self._copies:
            copy.pages.refuse(reason)
        self.gate.reject(reason)

    def _note_wrong(self, copy: PageCopy) -> None:
        if copy.pages.reason:
            self.gate.reject(copy.pages.reason)

    @property
    def progress(self) -> Progress:
        """How far the transfer thread is now."""
        started_ns = self._result.started_ns
        released, released_ns = self.gate.progress
        last_ns = released_ns if released else started_ns
        return Progress(
            layers=self._geometry.layers,
            pages=sum(len(copy.pages) for copy in self._copies),
            released=released,
            released_after_ns=max(0, last_ns - started_ns),
            since_ns=max(0, self._clock_ns() - last_ns),
            is_rejected=self.gate.rejected is not None,
            has_ended=self._ended.is_set(),
        )

    def finish(self) -> LoadResult:
        """Wait until nothing of this batch is being written any more; return which loads failed.

        Raises TransportError when a load does not end.
        """
        result = self._result
        try:
            self.gate.wait(self._geometry.layers - 1)
        except LoadRejected:
            # Other loads go on until all wrong pages are known, unless the wait was too long.
            if self.gate.overdue:
                self._cancelled.set()
        began_ns = 0 if self._ended.is_set() else self._clock_ns()
        if not self._ended.wait(JOIN_TIMEOUT_S):
            raise TransportError("a load does not end; its device pages cannot be used again")
        result.waited_ns = self.gate.waited_ns + (max(0, self._clock_ns() - began_ns) if began_ns else 0)
        lost: set[int] = set()
        for load, copy in zip(self._loads, self._copies, strict=True):
            if copy.pages.reason:
                result.failures.append(copy.failure())
                result.failed_requests.append(load.request_id)
                lost.update(copy.pages.device.tolist())
            result.pages += int((~copy.pages.wrong).sum())
        result.lost_pages = frozenset(lost)
        result.nbytes = result.pages * self._geometry.page_bytes
        return result

    def _load_layer(self, copy: PageCopy, layer: int) -> None:
        step = self._mover.piece_pages
        for start in range(0, len(copy.pages), step):
            if self._cancelled.is_set():
                raise TransportError("the load was given up")
            copy.copy(self._mover, layer, start, step)


def _behind_both(submit: Callable[[Callable[[], None]], object], stores: HostStores, work: Callable[[], None]) -> None:
    """Run ``work`` behind the loads submitted so far, and behind the stores of that time."""
    submit(lambda: stores.behind(work))


class Loads:
    """The worker's loads: the mapped pools, the mover and the one transfer thread. Used by the compute thread."""

    def __init__(
        self,
        geometry: KvGeometry,
        device_pages: int,
        mover: PageMover,
        *,
        timeout_s: float,
        clock_ns: Callable[[], int],
        submit: Callable[[Callable[[], None]], object] | None = None,
        verification: Verification | None = None,
        pins: Pins | None = None,
        device_type: str = "cpu",
        on_thread: Callable[[], None] | None = None,
        stores: HostStores | None = None,
    ) -> None:
        """Prepare; ``submit`` runs transfers one at a time in order; by default on a thread of their own.

        That thread calls ``on_thread`` first. Everything is verified unless ``verification`` says otherwise. ``pins``
        is for workers on a GPU. ``stores`` writes to mapped pools, which are released behind it.
        """
        self._threads: ThreadPoolExecutor | None = None
        if submit is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loads", initializer=on_thread)
            submit = self._threads.submit
        retire = submit
        if stores is not None:
            retire = partial(_behind_both, submit, stores)
        self.stores = stores
        self.pools = HostPools(geometry, pins, retire)
        self.neighbours = Neighbours(geometry, device_type)
        self._geometry = geometry
        self._device_pages = device_pages
        self._mover = mover
        self._verification = verification or Verification()
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._submit = submit
        self._promotions = Promotions(geometry.layers, mover, submit, clock_ns=clock_ns)

    def start(self, loads: Sequence[PageLoad]) -> BatchTransfer:
        """Begin to load; the caller finishes the transfer before it starts the next."""
        transfer = BatchTransfer(
            loads,
            [self._open(load) for load in loads],
            self._mover,
            self._geometry,
            timeout_s=self._timeout_s,
            clock_ns=self._clock_ns,
        )
        self._submit(transfer.run)
        return transfer

    def promote(self, order: PromotePages, ended: Callable[[Promoted], None]) -> None:
        """Copy ahead of demand, when no load wants the thread.

        ``ended`` is called once, on any thread, when nothing of this order is written any more.
        """
        copy = VerifiedCopy(order, self._device_pages, self._verification)
        copy.open(self.pools)
        self._promotions.add(order, copy, ended)

    def attach(self, storage_id: str, handle: PoolHandle) -> None:
        """Map a host pool; see :meth:`HostPools.attach`."""
        self._promotions.cancel(storage_id, "the host pool was replaced")
        self.pools.attach(storage_id, handle)
        self._verification.trust_again(storage_id)

    def detach(self, storage_id: str) -> None:
        """Unmap a host pool; promotions from it fail."""
        self._promotions.cancel(storage_id, "the host pool was detached")
        self.pools.detach(storage_id)

    def end_stores(self) -> None:
        """Stop the stores; return when nothing is written to host pools any more; idempotent."""
        if self.stores is not None:
            self.stores.close()

    def close(self) -> None:
        """End the thread, then unmap. Promotions under way stop after their piece and are not answered."""
        self._promotions.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self.end_stores()
        self.pools.close()
        self.neighbours.close()

    def _open(self, load: PageLoad) -> PageCopy:
        if load.neighbour_id:
            from_neighbour = NeighbourCopy(load, self._device_pages)
            from_neighbour.open(self.neighbours)
            return from_neighbour
        copy = VerifiedCopy(load, self._device_pages, self._verification)
        copy.open(self.pools)
        return copy
