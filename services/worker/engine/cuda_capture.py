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
        """Compute the step again, on the current stream, from the present contents of its memory."""


class Capture(Protocol):
    """A maker of graphs that are never replayed at the same time."""

    def graph_of(self, run: Callable[[], None]) -> Graph:
        """Return a graph of ``run``, which may also be called before the capture.

        Raises RuntimeError where that fails.
        """

    def used_bytes(self) -> int:
        """Return the device memory in use by all processes."""


class CudaCapture:
    """CUDA graphs that are captured on a stream of their own, into one memory pool that all of them share."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream and the pool's handle; ``device`` is a CUDA device."""
        self._device = device
        self._pool = _cuda.graph_pool_handle()
        self._stream = _cuda.Stream(device)

    def graph_of(self, run: Callable[[], None]) -> Graph:
        """Call ``run`` twice, then capture it.

        First calls compile kernels and make workspaces, which no capture may.
        """
        self._stream.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._stream):
            for _ in range(2):
                run()
        _cuda.current_stream(self._device).wait_stream(self._stream)
        graph: Graph = _cuda.CUDAGraph()
        ordinary = _cuda.current_stream(self._device)
        try:
            # Other threads may go on with work of their own meanwhile.
            with _cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:
            # A capture that was invalidated raises when it ends, and leaves its own stream the current one.
            _cuda.set_stream(ordinary)
        return graph

    def used_bytes(self) -> int:
        """Return the device memory in use by all processes, as the driver reports it."""
        free, total = _cuda.mem_get_info(self._device)
        return int(total - free)
