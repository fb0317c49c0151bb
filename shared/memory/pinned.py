"""Host memory that is registered with the CUDA driver: it stays where it is, and a GPU reads and writes it by itself.

A range is registered once in a process and unregistered before it is unmapped, since the driver keeps the pages that it
was given: a GPU would go on writing to them when the address has long been another's. So ranges are known here, nothing
overlaps, and no call is made that is known to fail.
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
"""How much of a pool is touched between two words of progress."""

PAGE_BYTES = 4096


class PinnedMemory:
    """The registered ranges of this process. Used by any thread."""

    def __init__(self, runtime: Callable[[], CudaRuntime]) -> None:
        """``runtime`` is asked for when it is first needed."""
        self._runtime = runtime
        self._changed = threading.Condition()
        self._under_way: set[tuple[int, int]] = set()  # The driver has been asked, and has not answered.
        self._uses: dict[tuple[int, int], int] = {}  # (first address, the one behind the last) to how often.

    def register(self, array: npt.NDArray[np.uint8]) -> None:
        """Pin the memory under ``array``, which may take minutes for a large pool; a range that is pinned is counted.

        Raises TransportError when it overlaps another range, or when the driver refuses, mostly for the limit on
        locked memory; the thread's next launch does not hear of that.
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
        """Undo one :meth:`register`, once that is through; a range that is not pinned is fine. Raises TransportError
        when the driver refuses.
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
        """Whether all of ``array``, which is contiguous, is pinned."""
        first, behind = _span(array)
        with self._changed:
            return any(begin <= first and behind <= end for begin, end in self._uses)

    def _call_register(self, array: npt.NDArray[np.uint8]) -> None:
        _touch(array)
        runtime = self._runtime()
        code = runtime.cudaHostRegister(array.ctypes.data, array.nbytes, _PORTABLE_AND_MAPPED)
        if code:
            # Else the thread's next kernel launch raises it as its own.
            runtime.cudaGetLastError()
        if code not in (0, _ALREADY_REGISTERED):
            raise TransportError(f"cudaHostRegister of {array.nbytes} bytes failed with code {code}: see ulimit -l")


def _span(array: npt.NDArray[np.uint8]) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


def _touch(array: npt.NDArray[np.uint8]) -> None:
    """Map every page of ``array`` into this process, and say how far it is where that takes long."""
    flat = array.reshape(-1)
    if flat.nbytes <= TOUCHED_BYTES:
        return
    with progress.phase("pinning host memory", total=flat.nbytes // 2**20, unit="MiB") as advance:
        for start in range(0, flat.nbytes, TOUCHED_BYTES):
            piece = flat[start : start + TOUCHED_BYTES]
            piece[::PAGE_BYTES].max()
            advance(piece.nbytes // 2**20)
