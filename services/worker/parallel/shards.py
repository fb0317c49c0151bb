"""A rank's shard of hidden states, and the all-gather that makes the whole of the shards (HCache section 5, multi-GPU
support): ranks read disjoint tokens, so that their links add up and nothing is read twice.

A shard that cannot be read must not end the restoration in one rank alone, because the others wait in a collective. So
it is noted, and the whole restoration is refused in the end.
"""

from __future__ import annotations

import torch

from services.worker.kv.movers.protocol import Fence
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share
from services.worker.restore.hidden_source import HiddenSource
from services.worker.restore.kv_source import KvSource


def shard_of(share: Share, pages: int) -> tuple[int, range]:
    """Pages of a shard, the same in every rank, and which of ``pages`` pages are this rank's; the last ranks may have
    fewer, or none.
    """
    each = -(-pages // share.ranks)
    return each, range(min(pages, share.rank * each), min(pages, (share.rank + 1) * each))


class Faults:
    """Why this rank's part of a restoration cannot be used; "" so far. Written by the transferring thread."""

    def __init__(self) -> None:
        self.first = ""

    def note(self, error: Exception) -> None:
        self.first = self.first or f"{type(error).__name__}: {error}"


class ShardSource:
    """A :class:`~services.worker.restore.hidden_source.HiddenSource` of a rank's shard, which never raises."""

    def __init__(self, inner: HiddenSource | None, rows: int, faults: Faults) -> None:
        """``inner`` has this rank's tokens, ``rows`` at the most; None where it has none, or cannot read them."""
        self.tokens = rows
        self._inner, self._faults = inner, faults

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        """See the protocol. What cannot be trusted, and what lies behind the last token, is left as it was."""
        if self._inner is None or self._faults.first:
            return
        try:
            end = min(end, self._inner.tokens)
            self._inner.read(layer, start, end, into[: end - start])
        except Exception as error:
            self._faults.note(error)


class NotedKv:
    """A :class:`~services.worker.restore.kv_source.KvSource` that never raises. Without ``inner`` other ranks load."""

    def __init__(self, inner: KvSource | None, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def load(self, layer: int) -> None:
        if self._inner is None or self._faults.first:
            return
        try:
            self._inner.load(layer)
        except Exception as error:
            self._faults.note(error)

    def fence(self) -> Fence | None:
        return None if self._inner is None else self._inner.fence()

    def drain(self) -> None:
        if self._inner is not None:
            self._inner.drain()


class ShardGather:
    """Joins the shards of one layer after the other. Every rank calls it for the same layers in the same order."""

    def __init__(self, collectives: Collectives, rows: int, like: torch.Tensor) -> None:
        """``rows`` of a shard, ``like`` an empty tensor [0, hidden] of their type and device."""
        self._collectives = collectives
        self._whole = like.new_zeros((collectives.ranks * rows, like.shape[1]))

    def whole(self, shard: torch.Tensor, tokens: int) -> torch.Tensor:
        """[rows, hidden] of every rank to [tokens, hidden] of all, in memory that the next layer overwrites."""
        self._collectives.gather(shard, self._whole)
        return self._whole[:tokens]
