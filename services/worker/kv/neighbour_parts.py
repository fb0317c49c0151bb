"""The device pool of a neighbour that is a tensor-parallel group: pages in parts, joined row by row as they are copied.

The bytes are those of a worker with one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.kv.page_memory import PageLayout, PageMemory, PageNumbers
from shared.memory.part_spans import of_plane, part_bytes, whole_bytes
from shared.messages.pools import KvGeometry, PartSpan

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class PartsMemory:
    """The mapped parts. Used by the transfer thread."""

    def __init__(self, geometry: KvGeometry, parts: Sequence[tuple[Sequence[PartSpan], PageMemory]]) -> None:
        """Prepare; ``parts`` are the mapped memories with the spans that are read from each."""
        self._geometry = geometry
        self._parts = list(parts)

    def staged(self, layer: int, pages: PageNumbers) -> PageMemory:
        """Return one layer of ``pages`` as whole rows in new memory, which holds them as pages 0, 1, ... in any layer.

        On a GPU the memory is on that of the first part; all bytes are there when this returns.
        """
        geometry, half = self._geometry, self._geometry.half_bytes
        layout = PageLayout(len(pages), geometry.layers, half, 2 * half, 0, half)
        first = self._parts[0][1]
        if first.tensor is None:
            rows = np.zeros((len(pages), 2, half), dtype=np.uint8)
            for spans, memory in self._parts:
                self._stage(rows, layer, spans, memory.host_rows(), pages)
            return PageMemory(layout, array=rows.reshape(-1))
        whole = torch.zeros((len(pages), 2, half), dtype=torch.uint8, device=first.tensor.device)
        for spans, memory in self._parts:
            there = memory.device_bytes()
            self._stage(whole, layer, spans, there, torch.from_numpy(pages.astype(np.int64)).to(there.device))
        _cuda.synchronize(whole.device)
        return PageMemory(layout, tensor=whole.view(-1))

    def _stage(self, whole: Any, layer: int, spans: Sequence[PartSpan], held: Any, pages: Any) -> None:
        """Copy the ``spans`` of a layer into ``whole`` [pages, 2, half_bytes].

        ``held`` has a part's pages, [pages, layers, 2, half_bytes].
        """
        for half in (0, 1):
            for span in of_plane(spans, 2 * layer + half, half):
                own = held[pages, span.own_first // 2, span.own_first % 2][:, None]
                found = part_bytes(own, msgspec.structs.replace(span, own_first=0))
                whole_bytes(whole, span)[...] = found if isinstance(whole, np.ndarray) else found.to(whole.device)
