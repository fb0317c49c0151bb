"""Hidden states for a tensor-parallel group (HCache section 5): every rank needs them all, each reads its share.

Ranks read disjoint runs of tokens and exchange them, so the group reads every byte once and with the bandwidth of all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from services.worker.restore.hidden_source import HiddenSource
from services.worker.restore.refusals import PiecesRefused


class GatheredSource:
    """A :class:`HiddenSource` over one on each rank. All ranks read the same layers and tokens in the same order, and
    none gives up alone: the others would wait for it until the group's own timeout.
    """

    def __init__(self, mine: HiddenSource, group: dist.ProcessGroup) -> None:
        self.tokens = mine.tokens
        self._mine = mine
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        """Raises PiecesRefused on every rank when any of them could not read its share."""
        share = -(-(end - start) // self._ranks)
        low, high = (min(end, start + share * rank) for rank in (self._rank, self._rank + 1))
        # One row more than a share tells the others whether it was read: no rank may go on alone.
        sent = into.new_zeros(share + 1, into.shape[1])
        reason: PiecesRefused | None = None
        try:
            if low < high:
                self._mine.read(layer, low, high, sent[: high - low])
        except PiecesRefused as error:
            reason = error
            sent[share].fill_(1)
        gathered = into.new_empty(self._ranks, share + 1, into.shape[1])
        dist.all_gather(list(gathered.unbind()), sent, group=self._group)
        refused = [rank for rank in range(self._ranks) if bool(gathered[rank, share, 0] != 0)]
        if refused:
            raise PiecesRefused(f"ranks {refused} could not read their share of layer {layer}") from reason
        into.copy_(gathered[:, :share].reshape(-1, into.shape[1])[: end - start])
