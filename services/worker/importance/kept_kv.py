"""Storage for K and V of the tokens that a layer chose, from the step that chose them to the request's end.

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
    """The chosen KV of one request. Layers may differ in how many tokens they chose."""

    def put(self, layer: int, kv: torch.Tensor) -> None:
        """Keep ``kv`` ``[2, kv_heads, k, head_dim]``; in each head, row i is K or V of its own i-th chosen token."""

    def between(self, layer: int, pool: DevicePool, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """Return K and V ``[2, kv_heads, n, head_dim]`` of slots ``before``, the chosen tokens, and slots ``behind``.

        Slots are those of the pool, int64.
        """


class KeptInMemory:
    """Chosen KV in tensors of its own, ``kv`` by layer, for evaluation."""

    def __init__(self) -> None:
        """Begin with no layer's KV."""
        self.kv: dict[int, torch.Tensor] = {}

    def put(self, layer: int, kv: torch.Tensor) -> None:
        """Keep a reference to ``kv``; nothing is copied."""
        self.kv[layer] = kv

    def between(self, layer: int, pool: DevicePool, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """Return a copy that joins pool slots and the tensor."""
        slots = pool.tensor[layer].flatten(1, 2)
        ends = (slots.index_select(1, each).transpose(1, 2) for each in (before, behind))
        return torch.cat([next(ends), self.kv[layer], next(ends)], dim=2)


class KeptInPages:
    """Chosen KV in leased pages of the device pool, the same ones in every layer."""

    def __init__(self, pool: DevicePool, pages: npt.NDArray[np.int32]) -> None:
        """Entry i of ``pages`` (int32) holds the chosen tokens ``[i * page_size, (i + 1) * page_size)``."""
        size = pool.geometry.page_size
        self.pages = pages
        self._pool = pool
        self._slots = torch.from_numpy(token_slots(pages, size, 0, len(pages) * size)).to(pool.device)
        self._counts: dict[int, int] = {}

    def put(self, layer: int, kv: torch.Tensor) -> None:
        """Put tokens into pages. Raises InvariantViolated when there are more than the pages hold."""
        count = kv.shape[2]
        if count > len(self._slots):
            raise InvariantViolated(f"{count} chosen tokens do not fit into leased room for {len(self._slots)}")
        self._pool.put_kv(layer, self._slots[:count], kv)
        self._counts[layer] = count

    def hold(self, layer: int, count: int) -> None:
        """Take note that another process has put ``count`` tokens of ``layer`` into these pages of its pool's part."""
        self._counts[layer] = count

    def between(self, layer: int, pool: DevicePool, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        """Return all of it by one gather from the pool."""
        slots = torch.cat([before, self._slots[: self._counts[layer]], behind])
        return pool.tensor[layer].flatten(1, 2).index_select(1, slots).transpose(1, 2)
