"""How a CUDA graph is made: work is run, then captured, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class Graph(Protocol):
    """A captured step, such as ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Compute it again, on the current stream, over what its memory now holds."""


class Capture(Protocol):
    """Makes graphs that are never replayed at the same time."""

    def graph_of(self, run: Callable[[], None]) -> Graph:
        """Capture ``run``, which may be called any number of times before. Raises RuntimeError when that fails."""

    def used_bytes(self) -> int:
        """Device memory in use, by all processes."""


class CudaCapture:
    """Captures on a stream of its own, into one memory that all graphs share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _cuda.graph_pool_handle()
        self._stream = _cuda.Stream(device)

    def graph_of(self, run: Callable[[], None]) -> Graph:
        """See :class:`Capture`. The first calls compile kernels and make workspaces, which no capture may."""
        self._stream.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._stream):
            for _ in range(2):
                run()
        _cuda.current_stream(self._device).wait_stream(self._stream)
        graph: Graph = _cuda.CUDAGraph()
        # Other threads may go on with work of their own meanwhile.
        with _cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph

    def used_bytes(self) -> int:
        free, total = _cuda.mem_get_info(self._device)
        return int(total - free)
