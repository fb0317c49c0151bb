"""Seconds of work on the device, and what the device can do at the most: the ceilings that figures are held against."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 512 * 2**20
"""Ten times the second-level cache of the largest chip: what was there before is gone."""

_cuda: Any = torch.cuda  # Streams and events have no types.


def device_seconds(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median of what ``work`` takes on the device, after one run that is not counted; a processor does it once.

    Before each run memory is overwritten, so that nothing is in a cache, and so that the device is busy while ``work``
    is being launched: what launching costs is not counted.
    """
    if device.type != "cuda":
        return _elapsed(work)
    work()
    flushed = _flushed(device)
    times: list[float] = []
    for _ in range(rounds):
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times)


def wall_seconds(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Median of what ``work`` takes from its call until the device is done, launching included; a processor does
    it once.
    """
    if device.type != "cuda":
        return _elapsed(work)

    def whole() -> None:
        work()
        torch.cuda.synchronize()

    whole()
    return statistics.median(_elapsed(whole) for _ in range(rounds))


def copy_gb_s(device: torch.device, nbytes: int, rounds: int) -> float:
    """Bytes read and written by a copy within the device, GB/s."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / device_seconds(lambda: target.copy_(source), rounds, device) / 1e9


def gemm_tflop_s(device: torch.device, size: int, dtype: torch.dtype, rounds: int) -> float:
    """Of a product of two square matrices of random numbers: zeros would take less power, and so be faster."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: left @ right, rounds, device) / 1e12


def _elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@functools.cache
def _flushed(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
