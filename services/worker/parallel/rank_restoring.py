"""Restoration of KV from hidden pages in a group: every rank runs it at the same time, over its own part of the pool.

Each recomputes its share of the first layers, reads its shard of the hidden states, joins the shards by an all-gather,
and projects them with its own K and V weights (HCache section 5). Rank 0 loads the layers that are kept as KV for all.
In the end the ranks tell one another whether all went well, so that a restoration counts in all of them or in none.
"""

from __future__ import annotations

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
from services.worker.restore.projection import KvProjection
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.transmission import Transmission
from shared.errors import InvariantViolated, ThermoclineError
from shared.ids import DIGEST_BYTES
from shared.memory import HostPoolView
from shared.messages.base import unpack_int32


class RankRestoring:
    """One rank's part in the restorations of its group. Used by the compute thread; a thread of its own transfers."""

    def __init__(
        self, runner: ModelRunner, collectives: Collectives, share: Share, *, staging_bytes: int, timeout_s: float
    ) -> None:
        """Prove that KV follows from hidden states, in a pass that all ranks take together.

        All ranks make theirs at the same time. Raises HiddenStatesUnsupported where KV does not follow.
        ``staging_bytes`` hold shards; the memory that joins them takes half as much again.
        """
        self.projection = KvProjection(runner)
        self._runner, self._collectives, self._share = runner, collectives, share
        self._timeout_s = timeout_s
        self._transmission = Transmission(runner.pool.device, staging_bytes)
        self._view: HostPoolView | None = None  # A view of the pool that was read last.

    def run(self, order: RestoreRows, gate: LayerGate | None, kv: KvSource | None = None) -> str:
        """Restore; return why the restored KV cannot be used, "" if it can. ``kv`` loads for all ranks, in rank 0.

        Raises errors that leave the other ranks in a collective.
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
            staging=self._transmission.staging if mix.from_hidden else None,
            timeout_s=self._timeout_s,
            loads=gate,
            gather=gather,
        )
        self._transmission.submit(restoration.run)
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
        """Return the most tokens that ranks restore together, a multiple of ``page_size``; 0 if no page fits."""
        return self._transmission.staging.rows(self.projection.shape, page_size)

    def let_go(self) -> None:
        """Unmap the hidden pool that was read last, because its storage has ended."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def close(self) -> None:
        """End the thread once it is idle, and unmap."""
        self._transmission.close()
        self.let_go()

    def _shard(self, order: RestoreRows, mine: range, faults: Faults) -> HiddenSource | None:
        """Return this rank's tokens of the order's pages.

        Return None where there are none, or where they cannot be read, which is recorded in ``faults``.
        """
        if not mine:
            return None
        try:
            pages = self._pages(order, mine)
        except (ThermoclineError, OSError) as error:
            faults.note(error)
            return None
        return HiddenOfPages(pages, self._transmission.turns(pages.geometry.unit_bytes))

    def _confirm(self, order: RestoreRows, faults: Faults) -> None:
        """Check again that no page of this rank's shard was given away meanwhile; record a fault if one was."""
        _, mine = shard_of(self._share, len(unpack_int32(order.hidden_pages)))
        try:
            if mine:
                self._pages(order, mine)
        except (ThermoclineError, OSError) as error:
            faults.note(error)

    def _pages(self, order: RestoreRows, mine: range) -> HiddenPages:
        """Return this rank's pages.

        Raises PiecesRefused for pages with other contents, TransportError for a pool that cannot be mapped.
        """
        if self._view is None or self._view.handle.name != order.handle.name:
            self.let_go()
            self._view = HostPoolView.attach(order.handle)
        numbers = np.frombuffer(order.hidden_pages, dtype="<i4").astype(np.int32)
        identities = np.frombuffer(order.identities, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        part = slice(mine.start, mine.stop)
        return HiddenPages(self._view, numbers[part], identities[part])


def check_order(order: RestoreRows) -> None:
    """Raise InvariantViolated for an order that ranks would understand differently."""
    pages = len(unpack_int32(order.hidden_pages))
    if not pages or pages * order.handle.geometry.page_size != order.end - order.start:
        raise InvariantViolated(f"{pages} hidden pages are not tokens {order.start} to {order.end}")
