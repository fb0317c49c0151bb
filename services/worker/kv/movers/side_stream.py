"""Streams on which a mover's copies run beside the model's kernels; nothing at all on a machine without a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from services.worker.kv.movers.protocol import Fence

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class SideStream(Protocol):
    """Inside ``with stream:`` whatever is launched goes to it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def fence(self) -> Fence | None:
        """Return a point after everything that was launched so far."""

    def wait(self, fence: Fence | None) -> None:
        """Do what is launched from now on behind ``fence``, a point of another stream of this GPU; None is no point."""

    def drain(self) -> None:
        """Wait for everything that was launched."""


def side_stream(device: torch.device) -> SideStream:
    """Return a stream for a pool on this device."""
    return CudaSideStream(device) if device.type == "cuda" else NoStream()


class NoStream:
    """Satisfies :class:`SideStream` where copies are done when their call returns."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None

    def fence(self) -> Fence | None:
        return None

    def wait(self, fence: Fence | None) -> None:
        return None

    def drain(self) -> None:
        return None


class CudaSideStream:
    """Satisfies :class:`SideStream`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _cuda.Stream(device=device)
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        context = _cuda.stream(self._stream)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def fence(self) -> Fence | None:
        event: Fence = self._stream.record_event()
        return event

    def wait(self, fence: Fence | None) -> None:
        if fence is not None:
            self._stream.wait_event(fence)

    def drain(self) -> None:
        self._stream.synchronize()
