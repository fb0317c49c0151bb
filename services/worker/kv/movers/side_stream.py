"""Streams on which a mover's copies run beside the model's kernels; stand-ins on a machine without a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from services.worker.kv.movers.protocol import Fence

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class SideStream(Protocol):
    """A stream; all work launched inside ``with stream:`` goes to it."""

    def __enter__(self) -> None:
        """Send work of the calling thread to this stream."""

    def __exit__(self, *error: object) -> None:
        """Send work to the stream that was current before."""

    def fence(self) -> Fence | None:
        """Return a point after everything that was launched so far."""

    def wait(self, fence: Fence | None) -> None:
        """Order all later work behind ``fence``, a point of another stream of this GPU; None has no effect."""

    def drain(self) -> None:
        """Wait for everything that was launched."""


def side_stream(device: torch.device) -> SideStream:
    """Return a stream for a pool on this device."""
    return CudaSideStream(device) if device.type == "cuda" else NoStream()


class NoStream:
    """Satisfies :class:`SideStream` where copies are done when their call returns."""

    def __enter__(self) -> None:
        """Do nothing: there is no stream to enter."""

    def __exit__(self, *error: object) -> None:
        """Do nothing, and let errors pass."""

    def fence(self) -> Fence | None:
        """Return None: nothing is pending."""
        return None

    def wait(self, fence: Fence | None) -> None:
        """Return at once: there is no other stream."""

    def drain(self) -> None:
        """Return at once: nothing is pending."""


class CudaSideStream:
    """Satisfies :class:`SideStream` by a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream on ``device``, a CUDA device."""
        self._stream = _cuda.Stream(device=device)
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        """Make this the calling thread's current stream; blocks may be nested."""
        context = _cuda.stream(self._stream)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: object) -> None:
        """Go back to the stream that was current before the block."""
        self._entered.pop().__exit__(*error)

    def fence(self) -> Fence | None:
        """Return a CUDA event recorded on this stream."""
        event: Fence = self._stream.record_event()
        return event

    def wait(self, fence: Fence | None) -> None:
        """Make this stream wait on the device for ``fence``; the host goes on."""
        if fence is not None:
            self._stream.wait_event(fence)

    def drain(self) -> None:
        """Block the host until this stream is idle."""
        self._stream.synchronize()
