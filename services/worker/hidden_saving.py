"""Saving of running requests' hidden states in pages that the scheduler has leased for them (HCache section 4.2.2).

Leases come and go with requests. The hidden states of a step are copied within the step
(:mod:`services.worker.restore.two_stage`); pages are written and sealed beside it, by the saving thread
(:mod:`services.worker.restore.leased_pages`), which also answers. A lease under which nothing can be saved is answered
at once, with no chunk.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_pools import Pins
from services.worker.requests import RunningRequest
from services.worker.restore.hidden_pools import HiddenPools
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.leased_pages import LeasedPages, LeasedRun, SavedHidden, lease_fault, pages_fault
from services.worker.restore.projection import KvProjection
from services.worker.restore.snapshot_ring import SnapshotRing
from services.worker.restore.two_stage import SavingCounts, TwoStageSaver
from services.worker.step_saving import NOT_SAVED, SavedStep, StepSaving
from services.worker.thread_device import use_device
from shared import logs
from shared.chunks import chunk_tokens
from shared.errors import ConfigError, InvalidRequest, TransportError
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.worker_plans import HiddenLease

_log = logs.get_logger("worker")

RING_TOKENS = 4096
"""Default size of the ring, two large batches: while one is being assembled, the next is copied."""

MAX_SEQUENCES = 256
"""Most sequences saved at a time. Each holds the rows of at most one chunk, until it is full."""

FLUSH_TIMEOUT_S = 10.0
"""Longest wait for the saving thread when the worker stops; leases unanswered by then end with the worker."""


@dataclass(frozen=True, slots=True)
class _Saver:
    """The ring and the two-stage saver for hidden states of one geometry."""

    geometry: KvGeometry
    ring: SnapshotRing
    two_stage: TwoStageSaver


@dataclass(frozen=True, slots=True)
class _Lease:
    """A hidden lease. ``sequence_id`` names it to the saver and is unique, even where a request comes again."""

    lease_id: int
    storage_id: str
    sequence_id: str


class HiddenSaving:
    """The hidden leases of one worker. Used by the compute thread, except for the answers."""

    def __init__(
        self,
        pool: DevicePool,
        projection: KvProjection | None,
        *,
        ring_bytes: int = 0,
        shm_prefix: str = "thermocline",
        pins: Pins | None = None,
        submit: Callable[[Callable[[], None]], object] | None = None,
        on_detached: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare; without ``projection`` only pages that hold no hidden states can be saved.

        ``on_detached`` is called when a pool is to be unmapped, so that other mappings of it are dropped. A ring of 0
        bytes holds ``RING_TOKENS`` tokens, whatever size their hidden states have. ``submit`` runs the saving thread's
        work, one at a time in order; by default on a thread of its own.
        """
        self.pools = HiddenPools(pool.geometry, pins, self._submit)
        self.counts = SavingCounts()
        self._pool, self._projection = pool, projection
        self._ring_bytes, self._shm_prefix = ring_bytes, shm_prefix
        self._given_submit = submit
        self._on_detached = on_detached
        self._threads: ThreadPoolExecutor | None = None
        self._answer: Callable[[SavedHidden], None] = _nobody
        self._leased = LeasedPages(lambda saved: self._answer(saved))
        self._leases: dict[str, _Lease] = {}  # By request id.
        self._numbers = itertools.count(1)
        self._saver: _Saver | None = None

    def answer_to(self, answer: Callable[[SavedHidden], None]) -> None:
        """Set the callback for answers, which is called once for each lease, on any thread.

        It is called when nothing is written to the lease's pages any more.
        """
        self._answer = answer

    # -- pools ------------------------------------------------------------------------------------------------

    def attach(self, storage_id: str, handle: PoolHandle) -> None:
        """Map a hidden pool; leases of an older one of that storage end."""
        self.detach(storage_id)
        self.pools.attach(storage_id, handle)
        try:
            self._prepare(self.pools.view(storage_id).geometry)
        except TransportError:
            return  # The pools have said why.
        except ConfigError as error:
            _log.warning("hidden_cannot_be_saved", storage=storage_id, reason=error.message)

    def detach(self, storage_id: str) -> None:
        """End the leases of a storage, then unmap its hidden pool; an unknown one is fine."""
        for request_id in [name for name, lease in self._leases.items() if lease.storage_id == storage_id]:
            self.end(request_id)
        self.pools.detach(storage_id)
        self._on_detached()

    # -- leases -----------------------------------------------------------------------------------------------

    def begin(self, request: RunningRequest, lease: HiddenLease) -> None:
        """Save a request's tokens from the lease's depth on."""
        self.end(request.request_id)
        try:
            saver, view = self._saver_for(lease.storage_id)
            pages = _unpack(lease.pages)
            fault = lease_fault(lease.depth, lease.parent, pages, view)
            if fault:
                raise InvalidRequest(fault)
        except (ConfigError, InvalidRequest, TransportError) as error:
            _log.warning("hidden_lease_refused", request=request.request_id, reason=error.message)
            self.decline(lease)
            return
        known = _Lease(lease.lease_id, lease.storage_id, f"{lease.lease_id}-{next(self._numbers)}")
        run = LeasedRun(lease.lease_id, view, lease.depth, pages, lease.parent, request.tokens)
        self._leased.open(known.sequence_id, run)
        if saver.two_stage.begin(known.sequence_id, lease.depth):
            self._leases[request.request_id] = known
        else:
            self._leased.end(known.sequence_id)

    def extend(self, request_id: str, packed: bytes) -> None:
        """Lease more pages (packed int32) for a request's hidden states; ignored where none are being saved."""
        lease = self._leases.get(request_id)
        if lease is None or not packed:
            return
        pages = _unpack(packed)
        fault = pages_fault(pages, self.pools.view(lease.storage_id))
        if fault:
            _log.warning("hidden_pages_refused", request=request_id, reason=fault)
            return
        self._leased.extend(lease.sequence_id, pages)

    def end(self, request_id: str) -> None:
        """Stop saving a request; the saving thread answers its lease when it is done with it."""
        lease = self._leases.pop(request_id, None)
        if lease is not None and self._saver is not None:
            self._saver.two_stage.end(lease.sequence_id)

    def decline(self, lease: HiddenLease) -> None:
        """Answer a lease under which nothing is saved."""
        self._answer(SavedHidden(lease.lease_id))

    def is_saving(self, request_id: str) -> bool:
        """Return whether hidden states of the request are saved."""
        return request_id in self._leases

    # -- steps ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether steps save nothing at present."""
        return self._saver is None or self._saver.two_stage.is_idle

    @contextmanager
    def step(self) -> Iterator[SavedStep]:
        """Run a step's forward passes, and all that may void them, within this block (``TwoStageSaver.step``)."""
        saver = self._saver
        if saver is None or self.is_idle:
            yield NOT_SAVED
            return
        inputs = None if self._projection is None else self._projection.inputs
        with saver.two_stage.step() as step:
            yield StepSaving(step, self._name_of, inputs, self._pool)

    # -- the end ----------------------------------------------------------------------------------------------

    def end_all(self) -> None:
        """End all leases; return when they are answered, or after ``FLUSH_TIMEOUT_S``."""
        for request_id in list(self._leases):
            self.end(request_id)
        if self._saver is not None:
            done = threading.Event()
            self._submit(done.set)
            if not done.wait(FLUSH_TIMEOUT_S):
                _log.warning("hidden_not_flushed", seconds=FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """End the thread, then release all memory. No step is under way."""
        for request_id in list(self._leases):
            self.end(request_id)
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads, self._given_submit = None, lambda work: work()
        self.pools.close()
        if self._saver is not None:
            self._saver.ring.close()
            self._saver = None

    # -- inside -----------------------------------------------------------------------------------------------

    def _name_of(self, request_id: str) -> str | None:
        """Return the name of a request's sequence, if it is being saved."""
        lease = self._leases.get(request_id)
        return None if lease is None else lease.sequence_id

    def _saver_for(self, storage_id: str) -> tuple[_Saver, HostPoolView]:
        """Return the saver and the pool.

        Raises TransportError when the storage has no hidden pool here, ConfigError when it cannot be saved to.
        """
        view = self.pools.view(storage_id)
        if self._saver is None or self._saver.geometry != view.geometry:
            raise ConfigError(f"hidden states of {view.geometry} are not saved here")
        return self._saver, view

    def _prepare(self, geometry: KvGeometry) -> None:
        """Make the saver for hidden states of this geometry, in the place of any other.

        Raises ConfigError when it cannot be made.
        """
        if self._saver is not None:
            if self._saver.geometry == geometry:
                return
            for request_id in list(self._leases):
                self.end(request_id)
            self._submit(self._saver.ring.close)  # Behind the rows that are still in it.
            self._saver = None
        self._check_hidden(geometry)
        first_loaded = geometry.absent + geometry.from_hidden
        # Without hidden states a unit is one layer's K or V, whose rows have the same width.
        width = geometry.hidden or geometry.kv_heads * geometry.head_dim
        ring = SnapshotRing(
            HiddenShape(geometry.layers, width, geometry.dtype),
            self._ring_bytes or RING_TOKENS * geometry.token_bytes,
            device=self._pool.device,
            shm_prefix=self._shm_prefix,
            layers=range(geometry.absent, first_loaded),
            kv_layers=range(first_loaded, geometry.layers),
        )
        two_stage = TwoStageSaver(
            ring,
            self._leased,
            max_sequences=MAX_SEQUENCES,
            piece_tokens=chunk_tokens(geometry.page_size),
            submit=self._submit,
            counts=self.counts,
        )
        self._saver = _Saver(geometry, ring, two_stage)

    def _check_hidden(self, geometry: KvGeometry) -> None:
        if not geometry.from_hidden:
            return
        shape = None if self._projection is None else self._projection.shape
        if shape is None or (shape.hidden, shape.dtype) != (geometry.hidden, geometry.dtype):
            raise ConfigError(f"the model has {shape or 'no'} hidden states to save, not {geometry}")

    def _submit(self, work: Callable[[], None]) -> object:
        if self._given_submit is not None:
            return self._given_submit(work)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                max_workers=1, thread_name_prefix="hidden", initializer=partial(use_device, self._pool.device)
            )
        return self._threads.submit(work)


def _nobody(saved: SavedHidden) -> None:
    """Ignore answers, until the executor sets its callback."""


def _unpack(packed: bytes) -> list[int]:
    return unpack_int32(packed[: len(packed) // 4 * 4])
