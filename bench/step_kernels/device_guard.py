"""A guard of CUDA devices that does nothing, for builds of torch without CUDA.

Indexing and copying switch to a tensor's device first. A build with CUDA has a guard that does nothing when there is no
GPU (``c10::impl::ensureCUDADeviceGuardSet``); a build for CPUs has none at all. Fake tensors need no more than that of
meta tensors, which is lent to them here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CUDA, _META = 1, 14
"""Their numbers in ``c10/core/DeviceType.h``."""


@contextmanager
def cuda_guard() -> Iterator[None]:
    """In this block there is a guard for CUDA devices, if need be one that does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    own = guards[_CUDA]
    guards[_CUDA] = own or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = own
