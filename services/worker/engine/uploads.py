"""Copies of a step's numbers to the device: one copy for all, for which the host does not wait.

A copy from pageable memory makes the host wait until the stream has got there, once for each tensor. Pinned memory is
read by the device when it gets there; torch gives it out again when the device has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# torch leaves these functions without types.
_cuda: Any = torch.cuda

_ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses with this alignment, and again for others."""


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """Return ``arrays`` on ``device``, copied in the order of the current stream. On a CPU they share their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(each) for each in arrays]
    starts, end = [], 0
    for each in arrays:
        starts.append(end)
        end += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=_cuda.is_initialized())
    host = staged.numpy()
    for start, each in zip(starts, arrays, strict=True):
        host[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    sent = staged.to(device, non_blocking=True)
    return [
        sent[start : start + each.nbytes].view(torch.from_numpy(each[:0]).dtype).view(each.shape)
        for start, each in zip(starts, arrays, strict=True)
    ]  # fmt: skip


def pinned(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """Return copies of ``arrays`` in pinned memory that ``device`` reads later; for a CPU, ``arrays`` themselves."""
    made = [torch.from_numpy(each) for each in arrays]
    return [each.pin_memory() for each in made] if device.type == "cuda" and _cuda.is_initialized() else made


def on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return ``tensors`` on ``device``: those of the host in one copy, as :func:`upload` makes it."""
    from_host = [each for each in tensors if each.device.type == "cpu"]
    if device.type == "cpu" or not from_host:
        return [each.to(device) for each in tensors]
    sent = iter(upload([each.numpy() for each in from_host], device))
    return [next(sent) if each.device.type == "cpu" else each for each in tensors]
