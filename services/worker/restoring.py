"""Restorations that a batch orders: chunks of prompts whose KV is restored from hidden pages instead of computed.

They run one after another before the batch's step (HCache section 3.1: transmission of a layer beside projection of
another is within each). The layers that a restoration recomputes attend to the tokens before it, which loads of the
same batch may still be bringing, so it waits for their gate layer by layer as a step does. One that fails is refused
and harms no other: its request falls back. One under which a load has failed is void, even if its own hidden states
were good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from services.worker.engine import forward_meta
from services.worker.engine.forward_meta import Segment
from services.worker.kv.layer_gate import LayerGate, LoadRejected
from services.worker.kv.settled import settle
from services.worker.requests import RunningRequest
from services.worker.restore.first_layers import PassRunner
from services.worker.restore.hidden_page_source import HiddenOfPages, HiddenPages, KvOfPages
from services.worker.restore.hidden_pools import HiddenPools
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported, PiecesRefused
from services.worker.restore.restoration import Restoration, RestorationStuck, Sources
from services.worker.restore.transmission import Transmission
from services.worker.steps import Work
from shared import logs
from shared.errors import ConfigError
from shared.ids import DIGEST_BYTES
from shared.messages.worker_plans import RestoreChunk

_log = logs.get_logger("worker")


class _LoadsFailed(Exception):
    """A load of the same batch failed, so there is nothing to attend to."""


@dataclass(slots=True)
class Restored:
    """Outcome of a batch's restorations. ``done`` have their KV, ``failed`` have not.

    ``rejected`` (request ids) could not be tried, ``refused`` are those of ``failed`` that failed by themselves and not
    because of a load. Times in ns; ``waited_ns`` is the part of ``took_ns`` spent at the gate of the loads.
    """

    done: list[Work] = field(default_factory=list)
    failed: list[Work] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    took_ns: int = 0
    waited_ns: int = 0

    @property
    def rows(self) -> int:
        """Tokens whose KV is restored."""
        return sum(work.rows for work in self.done)

    def keep(self, work: Sequence[Work]) -> None:
        """Keep the done work among ``work``; the other done work has failed, because it stands on missing pages."""
        kept = {id(item) for item in work}
        self.failed += [item for item in self.done if id(item) not in kept]
        self.done = [item for item in self.done if id(item) in kept]


class GroupRestoring(Protocol):
    """The part of a tensor-parallel group, ``parallel.group_runner.GroupRunner``, that restorations use."""

    def rows_at_once(self, page_size: int) -> int:
        """Return the most tokens that every rank can stage, a multiple of ``page_size``; 0: no bound."""

    def restore(
        self,
        pages: HiddenPages,
        segment: Segment,
        recomputed: int,
        ids: Sequence[int],
        loads: forward_meta.LayerGate | None,
    ) -> None:
        """Restore one segment's KV on all ranks; return when it is in the pool."""


class Restoring:
    """Carries out restorations. Used by the compute thread; a thread of its own transmits."""

    def __init__(
        self,
        runner: PassRunner,
        projection: KvProjection | None,
        pools: HiddenPools,
        *,
        staging_bytes: int,
        timeout_s: float,
        clock_ns: Callable[[], int],
        group: GroupRestoring | None = None,
    ) -> None:
        """Prepare; ``projection`` is None where hidden states restore nothing.

        ``timeout_s`` bounds the wait for one layer. A ``group`` of ranks restores together, in staging memory of its
        own.
        """
        self._group = group
        self._runner, self._projection, self._pools = runner, projection, pools
        self._staging_bytes, self._timeout_s, self._clock_ns = staging_bytes, timeout_s, clock_ns
        self._transmission = Transmission(runner.pool.device, staging_bytes)

    def run(
        self,
        requests: Mapping[str, RunningRequest],
        ordered: Sequence[RestoreChunk],
        taken: Collection[str],
        loads: LayerGate | None,
    ) -> Restored:
        """Restore the ``ordered`` chunks; return when the KV of all that succeed is in the pool.

        Requests in ``taken`` have a chunk in the same batch. Raises TransportError when a transfer does not end,
        because its device pages cannot be used again.
        """
        restored = Restored()
        began_ns = self._clock_ns()
        waited_ns = loads.waited_ns if loads is not None else 0
        seen = set(taken)
        for chunk in ordered:
            request = requests.get(chunk.request_id)
            if request is None or chunk.request_id in seen or not is_restorable(request, chunk):
                restored.rejected.append(chunk.request_id)
                continue
            seen.add(chunk.request_id)
            self._restore_or_refuse(restored, Work(request, chunk.start, chunk.end, False, True), chunk, loads)
        if ordered:
            restored.took_ns = max(0, self._clock_ns() - began_ns)
            restored.waited_ns = (loads.waited_ns if loads is not None else 0) - waited_ns
        return restored

    def close(self) -> None:
        """End the thread. No restoration is running, unless it is stuck."""
        self._transmission.close()

    def _restore_or_refuse(self, restored: Restored, work: Work, chunk: RestoreChunk, loads: LayerGate | None) -> None:
        try:
            self._restore(work, chunk, loads)
        except RestorationStuck:
            raise
        except _LoadsFailed as failed:
            restored.failed.append(work)
            _log.warning("restoration_void", request=chunk.request_id, reason=str(failed))
        except Exception as error:  # Also of the model's own code, which is called in an unusual way.
            restored.failed.append(work)
            restored.refused.append(chunk.request_id)
            _log.warning("restoration_refused", request=chunk.request_id, reason=f"{type(error).__name__}: {error}")
        else:
            restored.done.append(work)

    def _restore(self, work: Work, chunk: RestoreChunk, loads: LayerGate | None) -> None:
        """Restore a chunk in pieces of as many rows as can be staged."""
        pages = self._pages(chunk)
        mix = LayerMix.of_hidden(pages.geometry, chunk.recomputed)
        size = pages.geometry.page_size
        # Projection and loading look at no other token.
        gate = loads if mix.recomputed and chunk.start else None
        step = self._rows_at_once(mix, size) or work.rows
        for start in range(work.start, work.end, step):
            end = min(work.end, start + step)
            part = pages.part((start - work.start) // size, (end - work.start) // size)
            self._restore_rows(work.request, start, end, mix, part, gate)
        pages.confirm()

    def _pages(self, chunk: RestoreChunk) -> HiddenPages:
        """Return the hidden pages.

        Raises TransportError for a pool that is not mapped, PiecesRefused for one of another model.
        """
        view = self._pools.view(chunk.storage_id)
        if view.geometry.as_kv != self._runner.geometry:
            raise PiecesRefused(f"hidden states of {view.geometry.as_kv} restore no KV of {self._runner.geometry}")
        numbers = np.frombuffer(chunk.hidden_pages, dtype="<i4").astype(np.int32)
        identities = np.frombuffer(chunk.identities, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        return HiddenPages(view, numbers, identities)

    def _rows_at_once(self, mix: LayerMix, page_size: int) -> int:
        """Return the most rows to stage, a multiple of ``page_size``; 0: no bound.

        Raises HiddenStatesUnsupported or ConfigError.
        """
        if not mix.from_hidden:
            return 0
        if self._projection is None:
            raise HiddenStatesUnsupported("this worker cannot restore KV from hidden states")
        if self._group is not None:
            rows = self._group.rows_at_once(page_size)
        else:
            rows = self._transmission.staging.rows(self._projection.shape, page_size)
        if not rows:
            raise ConfigError(f"{self._staging_bytes} bytes cannot stage the hidden states of one page")
        return rows

    def _restore_rows(
        self, request: RunningRequest, start: int, end: int, mix: LayerMix, pages: HiddenPages, gate: LayerGate | None
    ) -> None:
        """Restore tokens ``[start, end)``, whose hidden states are in ``pages``."""
        if self._group is not None:
            ids = request.tokens[start:end]
            try:
                self._group.restore(pages, Segment(end - start, start, request.pages), mix.recomputed, ids, gate)
            except LoadRejected as rejected:
                raise _LoadsFailed(str(rejected)) from rejected
            return
        turns = self._transmission.turns(pages.geometry.unit_bytes)
        size = pages.geometry.page_size
        device_pages = request.pages[start // size : end // size]
        sources = Sources(
            hidden=HiddenOfPages(pages, turns) if mix.from_hidden else None,
            kv=KvOfPages(pages, self._runner.pool, device_pages, turns) if mix.loaded else None,
            ids=torch.tensor(request.tokens[start:end], dtype=torch.int64) if mix.recomputed else None,
        )
        restoration = Restoration(
            self._runner,
            self._projection,
            Segment(end - start, start, request.pages),
            mix,
            sources,
            staging=self._transmission.staging if mix.from_hidden else None,
            timeout_s=self._timeout_s,
            loads=gate,
        )
        self._transmission.submit(restoration.run)
        error = _complete(restoration)
        # The next users of these pages, when the batch has been reported, are on other streams.
        settle(self._runner.pool.device)
        if error is not None and gate is not None and gate.rejected is not None:
            raise _LoadsFailed(gate.rejected) from error
        if error is not None:
            raise error


def _complete(restoration: Restoration) -> Exception | None:
    """Do the computing thread's part; return, when nothing is being written any more, with what went wrong."""
    error: Exception | None = None
    try:
        restoration.begin()
        restoration.wait_all()
    except Exception as raised:
        error = raised
    try:
        restoration.finish()
    except LoadRejected as rejected:
        error = error or rejected
    return error


def is_restorable(request: RunningRequest, chunk: RestoreChunk) -> bool:
    """Return whether the chunk continues KV that is there, and consists of whole pages that are listed in full.

    The last token is always computed, for its logits. Hidden states are of exact KV, without sparse prefixes or
    adapters.
    """
    size = request.page_size
    pages = (chunk.end - chunk.start) // size
    return (
        chunk.attempt == request.attempt
        and not request.is_decoding
        and not request.adapter
        and (request.sparse is None or chunk.end <= request.sparse.start)
        and chunk.start == request.computed
        and not chunk.start % size
        and not chunk.end % size
        and chunk.start < chunk.end <= min(len(request.tokens) - 1, request.capacity)
        and len(chunk.hidden_pages) == 4 * pages
        and len(chunk.identities) == DIGEST_BYTES * pages
    )
