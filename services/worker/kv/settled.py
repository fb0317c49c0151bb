"""Waiting for the device: what steps have launched is done before anybody is told of it.

A GPU works on after the call that launched the work has returned. Other streams and other processes - loads,
promotions, backups, saves, neighbours - are not ordered behind the stream that computes. So they hear of pages only
when an event behind the writes has passed.
"""

from __future__ import annotations

from typing import Any

import torch

# torch leaves these functions without types.
_cuda: Any = torch.cuda


def settle(device: torch.device) -> None:
    """Return when everything that this thread has launched on ``device`` is done; at once on a CPU.

    Raises what the work raised: errors of kernels show here. Has not run on a GPU.
    """
    if device.type == "cuda":
        _cuda.current_stream(device).record_event().synchronize()
