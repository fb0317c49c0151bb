"""A rank's shard of hidden states, and the all-gather that joins the shards (HCache section 5, multi-GPU support).

Ranks read disjoint tokens, so that the bandwidths of their links add up and nothing is read twice.

A shard that cannot be read must not end the restoration in one rank alone, because the others wait in a collective. So
it is recorded, and the whole restoration is refused in the end.
"""

from __future__ import annotations

import torch

from services.worker.kv.movers.protocol import Fence
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share
from services.worker.restore.hidden_source import HiddenSource
from services.worker.restore.kv_source import KvSource


def shard_of(share: Share, pages: int) -> tuple[int, range]:
    """Return the pages of a shard, the same in every rank, and which of ``pages`` pages are this rank's.

    The last ranks may have fewer, or none.
    """
    each = -(-pages // share.ranks)
    return each, range(min(pages, share.rank * each), min(pages, (share.rank + 1) * each))


class Faults:
    """The reason why this rank's part of a restoration cannot be used, in ``first``; "" so far.

    Written by the transferring thread.
    """

    def __init__(self) -> None:
        """Begin without a fault."""
        self.first = ""

    def note(self, error: Exception) -> None:
        """Keep the first error, its type and message."""
        self.first = self.first or f"{type(error).__name__}: {error}"


class ShardSource:
    """A :class:`~services.worker.restore.hidden_source.HiddenSource` of a rank's shard, which never raises."""

    def __init__(self, inner: HiddenSource | None, rows: int, faults: Faults) -> None:
        """``inner`` has this rank's tokens, ``rows`` at the most; None where it has none, or cannot read them."""
        self.tokens = rows
        self._inner, self._faults = inner, faults

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        """Read a layer. Rows that cannot be trusted, and rows behind the last token, are left unchanged."""
        if self._inner is None or self._faults.first:
            return
        try:
            end = min(end, self._inner.tokens)
            self._inner.read(layer, start, end, into[: end - start])
        except Exception as error:
            self._faults.note(error)


class NotedKv:
    """A :class:`~services.worker.restore.kv_source.KvSource` whose loads never raise."""

    def __init__(self, inner: KvSource | None, faults: Faults) -> None:
        """Load from ``inner``, and note its errors in ``faults``; where it is None, another rank loads."""
        self._inner, self._faults = inner, faults

    def load(self, layer: int) -> None:
        """Load a layer; the first failure is recorded, and later layers are not loaded."""
        if self._inner is None or self._faults.first:
            return
        try:
            self._inner.load(layer)
        except Exception as error:
            self._faults.note(error)

    def fence(self) -> Fence | None:
        """Return the fence of ``inner``; None without one."""
        return None if self._inner is None else self._inner.fence()

    def drain(self) -> None:
        """Return when ``inner``, if there is one, is writing nothing any more."""
        if self._inner is not None:
            self._inner.drain()


class ShardGather:
    """The all-gather of shards, layer by layer. Every rank calls it for the same layers in the same order."""

    def __init__(self, collectives: Collectives, rows: int, like: torch.Tensor) -> None:
        """``rows`` of a shard; ``like`` is an empty tensor [0, hidden] of their type and device."""
        self._collectives = collectives
        self._whole = like.new_zeros((collectives.ranks * rows, like.shape[1]))

    def whole(self, shard: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return [tokens, hidden] from [rows, hidden] of every rank, in memory that the next layer overwrites."""
        self._collectives.gather(shard, self._whole)
        return self._whole[:tokens]
