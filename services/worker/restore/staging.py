"""Buffers on the device between the thread that brings hidden states and the thread that projects them.

They are used in turn, and one is written again only when its last layer has been projected. The number of layers that
fit bounds how far transmission may run ahead of computation: with recomputation in front, as far as all layers (HCache
section 4.1.2 prefetches hidden states while tokens are recomputed).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from services.worker.restore.hidden_shape import HiddenShape
from shared.errors import InvariantViolated, TransportError

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class StagingMemory:
    """Device memory for one restoration after another, allocated once: it is bounded, and its pages are warm."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate ``nbytes`` bytes of zeros on ``device``."""
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def rows(self, shape: HiddenShape, multiple: int) -> int:
        """Return the most tokens of a restoration, a multiple of ``multiple``; 0 if not even that fits.

        Two buffers, where they fit, let one layer be transmitted while the one before is being projected.
        """
        fits = len(self._bytes) // shape.row_bytes
        return (fits // 2 if fits >= 2 * multiple else fits) // multiple * multiple

    def buffers(self, shape: HiddenShape, tokens: int, layers: int) -> Staging:
        """Return as many buffers as fit for a restoration of ``tokens`` tokens in ``layers`` layers.

        The restoration before must have ended. Raises InvariantViolated when not even one fits.
        """
        each = tokens * shape.row_bytes
        depth = min(max(1, layers), len(self._bytes) // each)
        if depth < 1 and layers:
            raise InvariantViolated(f"{len(self._bytes)} bytes cannot stage hidden states of {tokens} tokens")
        typed = self._bytes[: depth * each].view(shape.torch_dtype)
        return Staging(typed.view(depth, tokens, shape.hidden))


class Staging:
    """Buffers that are used in turn, each for one layer."""

    def __init__(self, buffers: torch.Tensor) -> None:
        """Begin with all ``buffers`` [depth, tokens, hidden] free; for the computing thread.

        On a GPU the first use of each waits for the work that the current stream has now, which may still read it.
        """
        self._buffers = buffers
        self._depth, self._taken, self._given_back = len(buffers), 0, 0
        self._free = threading.Semaphore(self._depth)
        # Work launched by the computing thread may still read this memory.
        self._projected = [self._event()] * self._depth

    def take(self, timeout_s: float) -> torch.Tensor:
        """Take the next buffer, once it is free; on a GPU the current stream then waits for its last projection.

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
        """Return the ``number``-th taken buffer, for the computing thread."""
        return self._buffers[number % self._depth]

    def give_back(self, number: int) -> None:
        """Give back the ``number``-th buffer, whose projection is done or ordered in the current stream."""
        self._projected[number % self._depth] = self._event()
        self._given_back += 1
        self._free.release()

    def wake(self) -> None:
        """Let a waiting :meth:`take` return, for a restoration that was cancelled."""
        self._free.release()

    def _event(self) -> Any:
        """Return a point in the current stream; None on a CPU, where work is done when its call returns."""
        return _cuda.current_stream(self._buffers.device).record_event() if self._buffers.is_cuda else None
