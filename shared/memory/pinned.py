"""Host memory that is registered with the CUDA driver: it is never moved, and a GPU reads and writes it directly.

A range is registered once in a process and unregistered before it is unmapped, since the driver keeps the pages that it
was given: a GPU would go on writing to them when the address has long another use. So all ranges are recorded here,
none overlap, and no call is made that is known to fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared import progress
from shared.errors import TransportError
from shared.memory.cuda_runtime import CudaRuntime

# cudaHostRegisterPortable (for every context of this process) and cudaHostRegisterMapped (kernels may use the address).
_PORTABLE_AND_MAPPED = 1 | 2

_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered

TOUCHED_BYTES = 2**30
"""Bytes of a pool touched between two reports of progress."""

PAGE_BYTES = 4096


class PinnedMemory:
    """The registered ranges of this process. Used by any thread."""

    def __init__(self, runtime: Callable[[], CudaRuntime]) -> None:
        """``runtime`` is called when the runtime is first needed."""
        self._runtime = runtime
        self._changed = threading.Condition()
        self._under_way: set[tuple[int, int]] = set()  # Ranges being registered.
        self._uses: dict[tuple[int, int], int] = {}  # (first address, end) to the number of registrations.

    def register(self, array: npt.NDArray[np.uint8]) -> None:
        """Pin the memory under ``array``, which may take minutes for a large pool; repeats of a range are counted.

        Raises TransportError when it overlaps another range, or when the driver refuses, mostly for the limit on
        locked memory; the error is cleared, so that the thread's next launch does not raise it.
        """
        span = _span(array)
        with self._changed:
            self._changed.wait_for(lambda: span not in self._under_way)
            if span in self._uses:
                self._uses[span] += 1
                return
            if any(begin < span[1] and span[0] < end for begin, end in (*self._uses, *self._under_way)):
                raise TransportError(f"{array.nbytes} bytes overlap memory that is pinned already")
            self._under_way.add(span)
        is_registered = False
        try:
            self._call_register(array)
            is_registered = True
        finally:
            with self._changed:
                self._under_way.discard(span)
                if is_registered:
                    self._uses[span] = 1
                self._changed.notify_all()

    def unregister(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo one :meth:`register`, after waiting for it; a range that is not pinned is ignored.

        Raises TransportError when the driver refuses.
        """
        span = _span(array)
        with self._changed:
            self._changed.wait_for(lambda: span not in self._under_way)
            uses = self._uses.pop(span, 0)
            if uses > 1:
                self._uses[span] = uses - 1
        if uses != 1:
            return
        runtime = self._runtime()
        code = runtime.cudaHostUnregister(span[0])
        if code:
            runtime.cudaGetLastError()
        if code not in (0, _NOT_REGISTERED):
            raise TransportError(f"cudaHostUnregister of {array.nbytes} bytes failed with code {code}")

    def covers(self, array: npt.NDArray[np.uint8]) -> bool:
        """Return whether all of ``array``, which is contiguous, is pinned."""
        first, behind = _span(array)
        with self._changed:
            return any(begin <= first and behind <= end for begin, end in self._uses)

    def _call_register(self, array: npt.NDArray[np.uint8]) -> None:
        _touch(array)
        runtime = self._runtime()
        code = runtime.cudaHostRegister(array.ctypes.data, array.nbytes, _PORTABLE_AND_MAPPED)
        if code:
            # Otherwise the thread's next kernel launch raises it as its own.
            runtime.cudaGetLastError()
        if code not in (0, _ALREADY_REGISTERED):
            raise TransportError(f"cudaHostRegister of {array.nbytes} bytes failed with code {code}: see ulimit -l")


def _span(array: npt.NDArray[np.uint8]) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


def _touch(array: npt.NDArray[np.uint8]) -> None:
    """Map every page of ``array`` into this process, and report progress where that takes long."""
    flat = array.reshape(-1)
    if flat.nbytes <= TOUCHED_BYTES:
        return
    with progress.phase("pinning host memory", total=flat.nbytes // 2**20, unit="MiB") as advance:
        for start in range(0, flat.nbytes, TOUCHED_BYTES):
            piece = flat[start : start + TOUCHED_BYTES]
            piece[::PAGE_BYTES].max()
            advance(piece.nbytes // 2**20)
