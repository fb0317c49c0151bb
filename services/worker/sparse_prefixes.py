"""Sparse prefixes of this worker's requests, each made for the first step that needs it and dropped with its request.

Used by the compute thread. What a layer chose is kept across repeats of a step, and void as soon as KV that it was
chosen on turns out not to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.worker.importance.identification import ProbeHeads
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule
from services.worker.importance.kept_kv import KeptInPages
from services.worker.importance.prefix_source import PrefixSource
from services.worker.importance.selection import Budget, tokens_loaded
from services.worker.importance.selection_failed import SelectionFailed
from services.worker.importance.shares import chunk_shares
from services.worker.importance.similarity import ALPHA
from services.worker.kv.device_pool import DevicePool
from services.worker.requests import RunningRequest
from services.worker.steps import Work
from shared.chunks import chunk_tokens
from shared.errors import ConfigError
from shared.importance import PROBE_HEADS
from shared.messages.base import unpack_int32
from shared.messages.tokens import ImportanceUsage
from shared.messages.worker_events import SparseLoaded
from shared.messages.worker_plans import SparsePrefix


class DiskSource(PrefixSource, Protocol):
    """A prefix that is read from the disk; ``disk_bytes`` counts what that has taken so far."""

    @property
    def disk_bytes(self) -> int:
        """Bytes read from the disk for it so far."""
        ...


OpenSource = Callable[[SparsePrefix], DiskSource]
"""Raises a ThermoclineError where the prefix cannot be read."""


@dataclass(frozen=True, slots=True)
class ImportanceSettings:
    """As ``WorkerConfig`` has them."""

    probe_heads: int = PROBE_HEADS
    alpha: float = ALPHA
    prefetch_keys: bool = True


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """A prefix whose layers have all chosen, and what is reported of it."""

    prefix: ImportantPrefix
    event: SparseLoaded


@dataclass(slots=True)
class _Open:
    """``losses`` are those of the request when the prefix was opened."""

    source: DiskSource
    prefix: ImportantPrefix
    losses: int


class SparsePrefixes:
    """The sparse prefixes of one worker, by request."""

    def __init__(
        self,
        pool: DevicePool,
        open_source: OpenSource | None,
        clock_ns: Callable[[], int],
        settings: ImportanceSettings | None = None,
        on_closed: Callable[[ImportantPrefix], object] = lambda prefix: None,
    ) -> None:
        """Without ``open_source`` no prefix can be read, so that all are refused. ``clock_ns`` measures waits.

        ``on_closed`` is called with each prefix that is not used any more.
        """
        self._pool, self._open_source = pool, open_source
        self._clock_ns = clock_ns
        self._settings = settings or ImportanceSettings()
        self._on_closed = on_closed
        self._opened: dict[str, _Open] = {}  # By request.

    def needed_by(self, work: Sequence[Work]) -> dict[int, ImportantPrefix]:
        """Return the prefixes that ``work`` attends over, by its place.

        Raises SelectionFailed for one that cannot be read.
        """
        return {
            number: self._prefix_of(item.request, item.request.sparse)
            for number, item in enumerate(work)
            if item.request.sparse is not None and item.start >= item.request.sparse.end
        }

    def take_in(self, computed: Iterable[RunningRequest]) -> list[LoadedPrefix]:
        """Return the prefixes of these requests that a step has brought to their end, each once.

        The usage of their requests counts them now.
        """
        loaded = []
        for request in computed:
            opened = self._opened.get(request.request_id)
            if opened is None or request.sparse is None or request.importance is not None:
                continue
            if opened.prefix.is_complete:
                request.importance = self._usage(opened, request.sparse)
                loaded.append(self._loaded(opened, request, request.sparse))
        return loaded

    def end(self, request_id: str) -> None:
        """End a request."""
        opened = self._opened.pop(request_id, None)
        if opened is not None:
            self._on_closed(opened.prefix)

    def _prefix_of(self, request: RunningRequest, sparse: SparsePrefix) -> ImportantPrefix:
        opened = self._opened.get(request.request_id)
        if opened is None or opened.losses != request.sparse_losses:
            self.end(request.request_id)
            try:
                opened = self._open(request, sparse)
            except Exception as error:  # Whatever it is, it is one request's misfortune.
                raise SelectionFailed(request.request_id) from error
            self._opened[request.request_id] = opened
            request.importance = None
        return opened.prefix

    def _open(self, request: RunningRequest, sparse: SparsePrefix) -> _Open:
        if self._open_source is None:
            raise ConfigError("this worker reads no sparse prefixes")
        source = self._open_source(sparse)
        wanted, settings = sparse.importance, self._settings
        room = tokens_loaded(wanted.ratio, sparse.end - sparse.start)
        budget = Budget(wanted.ratio, wanted.first_tokens, wanted.recent_tokens, room)
        prefix = ImportantPrefix(
            source,
            LoadingRule(budget, wanted.metric, ProbeHeads(settings.probe_heads), settings.alpha),
            self._pool.geometry.layers,
            lambda: self._clock_ns() / 1e9,
            prefetches_keys=settings.prefetch_keys,
            kept=KeptInPages(self._pool, np.array(unpack_int32(sparse.pages), dtype=np.int32)),
            name=request.request_id,
        )
        return _Open(source, prefix, request.sparse_losses)

    def _usage(self, opened: _Open, sparse: SparsePrefix) -> ImportanceUsage:
        prefix, layers = opened.prefix, self._pool.geometry.layers
        return ImportanceUsage(
            ratio=sparse.importance.ratio,
            metric=sparse.importance.metric,
            loaded_tokens=-(-sum(each.shape[1] for each in prefix.positions.values()) // layers),
            layers=layers,
            layers_fallen_back=prefix.layers_fallen_back,
            disk_bytes=opened.source.disk_bytes,
        )

    def _loaded(self, opened: _Open, request: RunningRequest, sparse: SparsePrefix) -> LoadedPrefix:
        chunk = chunk_tokens(request.page_size)
        chosen = opened.prefix.positions.values()
        event = SparseLoaded(
            request_id=request.request_id,
            attempt=request.attempt,
            shares=chunk_shares(chosen, sparse.start, sparse.end, sparse.depth, chunk),
            disk_bytes=opened.source.disk_bytes,
            read_us=round(opened.prefix.stall_s * 1e6),
            keys_us=round(opened.prefix.keys_stall_s * 1e6),
        )
        return LoadedPrefix(opened.prefix, event)
