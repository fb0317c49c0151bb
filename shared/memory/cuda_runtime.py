"""What is asked of the CUDA runtime itself, by the very library that torch has loaded, and which of its errors stay.

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
"""Errors behind which no call of the process works (CUDA Runtime API, ``cudaError_t``), and how CUDA words them."""

_WORDS = "CUDA error: "


class CudaRuntime(Protocol):
    """Functions of the CUDA runtime; each returns a ``cudaError_t``."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int: ...  # noqa: N802 - CUDA's name.

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802 - CUDA's name.

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name.
        """Return the last error of this thread, and clear it."""


class LoadedRuntime:
    """Satisfies :class:`CudaRuntime` by the shared library of this process. Has not run with one."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name.
        return int(self._library.cudaHostRegister(address, nbytes, flags))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name.
        return int(self._library.cudaHostUnregister(address))

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name.
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
    """CUDA's words if ``error``, or what caused it, has broken the context of this process; else ""."""
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
    """Whether the device had no memory left for a call, which harms nothing else."""
    is_torchs = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_torchs or getattr(error, "error_code", None) == OUT_OF_MEMORY or f"{_WORDS}out of memory" in str(error)
