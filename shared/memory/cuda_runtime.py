"""Calls of the CUDA runtime itself, by the very library that torch has loaded, and its permanent errors.

Most errors belong to one call. Some leave the context of the process broken: every later call of any kind fails, and
only a new process helps. A failed call is also remembered by its thread as the *last error*, which the next kernel
launch raises as if it were its own; code that expects a failure must clear it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

from shared.errors import DeviceFailed, TransportError

OUT_OF_MEMORY = 2

STICKY = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "Invalid access of peer GPU memory over nvlink or a hardware error",
    999: "unknown error",
}
"""Errors after which every call of the process fails (CUDA Runtime API, ``cudaError_t``), with CUDA's texts."""

_WORDS = "CUDA error: "


class CudaRuntime(Protocol):
    """Functions of the CUDA runtime; each returns a ``cudaError_t``."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name.
        """Pin ``nbytes`` of host memory at ``address`` for copies to and from devices."""

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name.
        """Unpin host memory that was pinned from ``address`` on."""

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name.
        """Return the last error of this thread, and clear it."""


class LoadedRuntime:
    """A :class:`CudaRuntime` over the shared library of this process. Not yet run with a real one."""

    def __init__(self, library: Any) -> None:
        """Wrap ``library``, a ``ctypes.CDLL`` of the CUDA runtime, and declare its argument types."""
        self._library = library
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name.
        """Pin host memory through the loaded library."""
        return int(self._library.cudaHostRegister(address, nbytes, flags))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name.
        """Unpin host memory through the loaded library."""
        return int(self._library.cudaHostUnregister(address))

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name.
        """Return and clear the calling thread's last error in the loaded library."""
        return int(self._library.cudaGetLastError())


def loaded_runtime(maps: Path = Path("/proc/self/maps")) -> CudaRuntime:
    """Return the runtime that is mapped into this process: another copy would have last errors of its own.

    Raises TransportError where there is none.
    """
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart.so"):
            return LoadedRuntime(ctypes.CDLL(path))
    raise TransportError("this process has not loaded the CUDA runtime as a library")


def sticky_reason(error: BaseException | None) -> str:
    """Return CUDA's text if ``error``, or its cause, has broken the context of this process; otherwise ""."""
    while error is not None:
        code = getattr(error, "error_code", None)  # Of torch.AcceleratorError.
        if isinstance(code, int) and code in STICKY:
            return STICKY[code]
        text = str(error)
        if _WORDS in text:
            found = next((words for words in STICKY.values() if _WORDS + words in text), "")
            if found:
                return found
        if isinstance(error, DeviceFailed):
            return error.message
        error = error.__cause__
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device had no memory left for a call, which harms nothing else."""
    is_torchs = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_torchs or getattr(error, "error_code", None) == OUT_OF_MEMORY or f"{_WORDS}out of memory" in str(error)
