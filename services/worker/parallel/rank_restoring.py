"""Restoration of KV from hidden pages in a group: every rank runs it at the same time, over its own part of the pool.

Each recomputes its share of the first layers, reads its shard of the hidden states, joins the shards by an all-gather,
and projects them with its own K and V weights (HCache section 5). Rank 0 loads the layers that come back as KV for all.
In the end the ranks tell one another whether all went well, so that a restoration counts in all of them or in none.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from services.worker.engine.forward_meta import LayerGate, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.settled import settle
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share
from services.worker.parallel.orders import RestoreRows
from services.worker.parallel.shards import Faults, NotedKv, ShardGather, ShardSource, shard_of
from services.worker.restore.hidden_page_source import HiddenOfPages, HiddenPages
from services.worker.restore.hidden_source import HiddenSource
from services.worker.restore.kv_source import KvSource
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.pinned_turns import PinnedTurns, pinned_turns
from services.worker.restore.projection import KvProjection
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.staging import StagingMemory
from services.worker.thread_device import use_device
from shared.errors import InvariantViolated, ThermoclineError
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32


class RankRestoring:
    """What one rank does of the restorations of its group. Used by the thread that computes; another transmits."""

    def __init__(
        self, runner: ModelRunner, collectives: Collectives, share: Share, *, staging_bytes: int, timeout_s: float
    ) -> None:
        """All ranks make theirs at the same time: it proves that KV follows from hidden states in a pass that they take
        together. Raises HiddenStatesUnsupported where it does not. ``staging_bytes`` hold shards; what they are joined
        in takes half as much again.
        """
        self.projection = KvProjection(runner)
        self._runner, self._collectives, self._share = runner, collectives, share
        self._staging_bytes, self._timeout_s = staging_bytes, timeout_s
        self._staging: StagingMemory | None = None
        self._turns: PinnedTurns | None = None
        self._view: HostPoolView | None = None  # Of the pool that was read last.
        self._thread: ThreadPoolExecutor | None = None

    def run(self, order: RestoreRows, gate: LayerGate | None, kv: KvSource | None = None) -> str:
        """Restore; returns why what was restored cannot be used, "" if it can. ``kv`` loads for all ranks, in rank 0.

        Raises whatever leaves the others in a collective.
        """
        faults = Faults()
        numbers = unpack_int32(order.hidden_pages)
        mix = LayerMix.of_hidden(order.handle.geometry, order.recomputed)
        segment = Segment(order.end - order.start, order.start, np.frombuffer(order.pages, dtype="<i4"))
        gather, source = None, None
        if mix.from_hidden:
            each, mine = shard_of(self._share, len(numbers))
            rows = each * order.handle.geometry.page_size
            source = ShardSource(self._shard(order, mine, faults), rows, faults)
            shape = self.projection.shape
            like = torch.empty((0, shape.hidden), dtype=shape.torch_dtype, device=self._runner.pool.device)
            gather = ShardGather(self._collectives, rows, like)
        ids = torch.tensor(unpack_int32(order.ids), dtype=torch.int64)
        restoration = Restoration(
            self._runner,
            self.projection,
            segment,
            mix,
            Sources(source, NotedKv(kv, faults) if mix.loaded else None, ids if mix.recomputed else None),
            staging=self._staging_memory() if mix.from_hidden else None,
            timeout_s=self._timeout_s,
            loads=gate,
            gather=gather,
        )
        self._submit(restoration)
        try:
            restoration.begin()
            restoration.wait_all()
        finally:
            restoration.finish()
        settle(self._runner.pool.device)
        if source is not None and not faults.first:
            self._confirm(order, faults)
        failed = torch.tensor([1.0 if faults.first else 0.0], device=self._runner.pool.device)
        ranks = int(self._collectives.sum(failed).item())
        return (faults.first or f"{ranks} other ranks could not read their shards") if ranks else ""

    def rows_at_once(self, page_size: int) -> int:
        """Tokens that the ranks restore together at the most, a multiple of ``page_size``; 0 if not even that fits."""
        return self._staging_memory().rows(self.projection.shape, page_size)

    def let_go(self) -> None:
        """Unmap the hidden pool that was read last; its storage is gone."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def close(self) -> None:
        """Let the thread end, and unmap."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
        self.let_go()

    def _shard(self, order: RestoreRows, mine: range, faults: Faults) -> HiddenSource | None:
        """Return this rank's tokens of the order's pages; None where there are none, or the fault was noted."""
        if not mine:
            return None
        try:
            pages = self._pages(order, mine)
        except (ThermoclineError, OSError) as error:
            faults.note(error)
            return None
        return HiddenOfPages(pages, self._pinned_turns(pages.geometry.unit_bytes))

    def _confirm(self, order: RestoreRows, faults: Faults) -> None:
        """Look once more whether the pages of this rank's shard were given away meanwhile."""
        _, mine = shard_of(self._share, len(unpack_int32(order.hidden_pages)))
        try:
            if mine:
                self._pages(order, mine)
        except (ThermoclineError, OSError) as error:
            faults.note(error)

    def _pages(self, order: RestoreRows, mine: range) -> HiddenPages:
        """Return the pages. Raises PiecesRefused for what holds something else, TransportError for what cannot be
        mapped.
        """
        if self._view is None or self._view.handle.name != order.handle.name:
            self.let_go()
            self._view = HostPoolView.attach(order.handle)
        numbers = np.frombuffer(order.hidden_pages, dtype="<i4").astype(np.int32)
        identities = np.frombuffer(order.identities, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        part = slice(mine.start, mine.stop)
        return HiddenPages(self._view, numbers[part], identities[part])

    def _staging_memory(self) -> StagingMemory:
        if self._staging is None:
            self._staging = StagingMemory(self._staging_bytes, self._runner.pool.device)
        return self._staging

    def _pinned_turns(self, unit_bytes: int) -> PinnedTurns | None:
        if self._turns is None or self._turns.nbytes < unit_bytes:
            self._turns = pinned_turns(self._runner.pool.device, unit_bytes)
        return self._turns

    def _submit(self, restoration: Restoration) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                max_workers=1, thread_name_prefix="restoring", initializer=partial(use_device, self._runner.pool.device)
            )
        self._thread.submit(restoration.run)


def check_order(order: RestoreRows) -> None:
    """Raise InvariantViolated for an order that ranks would understand differently."""
    pages = len(unpack_int32(order.hidden_pages))
    if not pages or pages * order.handle.geometry.page_size != order.end - order.start:
        raise InvariantViolated(f"{pages} hidden pages are not tokens {order.start} to {order.end}")
