"""Where K and V of what a layer chose are kept, from the step that chose them to the request's end.

In service they lie in leased pages of the device pool, so that they are accounted for where all KV is; evaluation,
which has no scheduler that would lease pages, keeps them in memory of their own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.importance.prefix_source import token_slots
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated


class KeptKv(Protocol):
    """What one request has chosen. Layers may differ in how many tokens that is."""

    def put(self, layer: int, kv: torch.Tensor) -> None:
        """Keep ``kv`` ``[2, kv_heads, k, head_dim]``; in each head, row i is K or V of its own i-th chosen token."""

    def between(self, layer: int, pool: DevicePool, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """K and V in slots ``before`` of the pool, of what was chosen, and in slots ``behind``; slots are int64.

        ``[2, kv_heads, n, head_dim]``.
        """


class KeptInMemory:
    """``kv`` by layer, as it was put."""

    def __init__(self) -> None:
        self.kv: dict[int, torch.Tensor] = {}

    def put(self, layer: int, kv: torch.Tensor) -> None:
        self.kv[layer] = kv

    def between(self, layer: int, pool: DevicePool, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        slots = pool.tensor[layer].flatten(1, 2)
        ends = (slots.index_select(1, each).transpose(1, 2) for each in (before, behind))
        return torch.cat([next(ends), self.kv[layer], next(ends)], dim=2)


class KeptInPages:
    """In pages of the device pool, in every layer the same ones."""

    def __init__(self, pool: DevicePool, pages: npt.NDArray[np.int32]) -> None:
        """Entry i of ``pages`` (int32) holds the chosen tokens ``[i * page_size, (i + 1) * page_size)``."""
        size = pool.geometry.page_size
        self._pool = pool
        self._slots = torch.from_numpy(token_slots(pages, size, 0, len(pages) * size)).to(pool.device)
        self._counts: dict[int, int] = {}

    def put(self, layer: int, kv: torch.Tensor) -> None:
        """Put tokens into pages. Raises InvariantViolated when there are more than the pages hold."""
        count = kv.shape[2]
        if count > len(self._slots):
            raise InvariantViolated(f"{count} chosen tokens do not fit into leased room for {len(self._slots)}")
        self._pool.tensor[layer].flatten(1, 2).index_copy_(1, self._slots[:count], kv.transpose(1, 2))
        self._counts[layer] = count

    def between(self, layer: int, pool: DevicePool, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        slots = torch.cat([before, self._slots[: self._counts[layer]], behind])
        return pool.tensor[layer].flatten(1, 2).index_select(1, slots).transpose(1, 2)
