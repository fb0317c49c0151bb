"""Waiting for the device, so that launched work is done before it is reported.

A GPU works on after the call that launched the work has returned. Other streams and other processes - loads,
promotions, backups, saves, neighbours - are not ordered behind the stream that computes. So pages are reported to them
only when an event behind the writes has passed.
"""

from __future__ import annotations

from typing import Any

import torch

from shared.errors import DeviceFailed
from shared.memory.cuda_runtime import sticky_reason

# torch leaves these functions without types.
_cuda: Any = torch.cuda


def settle(device: torch.device) -> None:
    """Return when all work that this thread has launched on ``device`` is done; at once on a CPU.

    Errors of kernels show here. Raises DeviceFailed for one that leaves the GPU unusable to this process, and torch's
    own for others. Has not run on a GPU.
    """
    if device.type == "cuda":
        try:
            _cuda.current_stream(device).record_event().synchronize()
        except RuntimeError as error:
            raise_if_failed(error)
            raise


def raise_if_failed(error: BaseException) -> None:
    """Raise DeviceFailed where ``error`` says that this process cannot use its GPU any more."""
    reason = sticky_reason(error)
    if reason:
        raise DeviceFailed(f"the GPU failed, and only a new process can use it: {reason}") from error
