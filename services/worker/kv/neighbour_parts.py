"""The device pool of a neighbour that is a tensor-parallel group: pages in parts, heads by heads, put together row by
row as they are copied. The bytes are those of a worker with one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.worker.kv.page_memory import PageLayout, PageMemory, PageNumbers
from shared.messages.pools import KvGeometry

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class PartsMemory:
    """The mapped parts. Used by the transfer thread."""

    def __init__(self, geometry: KvGeometry, parts: Sequence[tuple[range, PageMemory]]) -> None:
        """``parts`` have every head of ``geometry`` between them; heads that several have are read from the first."""
        self._geometry = geometry
        self._parts: list[tuple[range, PageMemory]] = []
        next_head = 0
        for heads, memory in parts:
            if heads.stop > next_head:
                self._parts.append((heads, memory))
                next_head = heads.stop

    def staged(self, layer: int, pages: PageNumbers) -> PageMemory:
        """One layer of ``pages``, whole rows in memory of their own, which holds them as pages 0, 1, ... in any layer.
        On a GPU that of the first part; everything is there when this returns.
        """
        geometry, half = self._geometry, self._geometry.half_bytes
        layout = PageLayout(len(pages), geometry.layers, half, 2 * half, 0, half)
        shape = (len(pages), 2, geometry.page_size, geometry.kv_heads, geometry.head_bytes)
        first = self._parts[0][1]
        if first.tensor is None:
            rows = np.empty(shape, dtype=np.uint8)
            for heads, memory in self._parts:
                held = memory.host_rows()[pages, layer]
                rows[:, :, :, heads.start : heads.stop] = held.reshape(*shape[:3], len(heads), -1)
            return PageMemory(layout, array=rows.reshape(-1))
        whole = torch.empty(shape, dtype=torch.uint8, device=first.tensor.device)
        for heads, memory in self._parts:
            there = memory.device_bytes()
            index = torch.from_numpy(pages.astype(np.int64)).to(there.device)
            held = there[index, layer].view(*shape[:3], len(heads), -1)
            whole[:, :, :, heads.start : heads.stop] = held.to(whole.device)
        _cuda.synchronize(whole.device)
        return PageMemory(layout, tensor=whole.view(-1))
