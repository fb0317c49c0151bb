"""Buffers on the device between the thread that brings hidden states and the thread that projects them.

They are used in turn, and one is written again only when its last layer has been projected. How many there are decides
how far ahead of computation transmission may run: with recomputation in front, as far as all layers (HCache section
4.1.2 prefetches hidden states while tokens are recomputed).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from services.worker.restore.hidden_shape import HiddenShape
from shared.errors import TransportError

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class Staging:
    """``depth`` buffers [tokens, hidden]."""

    def __init__(self, shape: HiddenShape, tokens: int, depth: int, device: torch.device) -> None:
        size = (depth, tokens, shape.hidden)
        self._buffers = torch.empty(size, dtype=shape.torch_dtype, device=device)
        self._free = threading.Semaphore(depth)
        self._depth, self._taken, self._given_back = depth, 0, 0
        self._projected: list[Any] = [None] * depth

    def take(self, timeout_s: float) -> torch.Tensor:
        """The next buffer, once it is free; on a GPU the current stream then waits for its last projection.

        For the transmitting thread. Raises TransportError when it does not become free in time.
        """
        if not self._free.acquire(timeout=timeout_s):
            raise TransportError(f"hidden states were not projected within {timeout_s} s")
        index = self._taken % self._depth
        self._taken += 1
        if self._projected[index] is not None:
            _cuda.current_stream(self._buffers.device).wait_event(self._projected[index])
        return self._buffers[index]

    @property
    def has_free(self) -> bool:
        """Whether :meth:`take` would return at once."""
        return self._taken - self._given_back < self._depth

    def buffer(self, number: int) -> torch.Tensor:
        """The buffer that was taken as the ``number``-th, for the computing thread."""
        return self._buffers[number % self._depth]

    def give_back(self, number: int) -> None:
        """The ``number``-th has been projected, or will have been when the current stream comes here."""
        if self._buffers.is_cuda:
            self._projected[number % self._depth] = _cuda.current_stream(self._buffers.device).record_event()
        self._given_back += 1
        self._free.release()

    def wake(self) -> None:
        """Let a waiting :meth:`take` go on; for a restoration that was given up."""
        self._free.release()
