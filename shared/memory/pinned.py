"""Registering mapped memory as pinned with the CUDA driver, for whoever has it: ``cudart`` is passed in, so that this
module needs no torch. Registered memory stays where it is, and a GPU reads and writes it by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import TransportError

# cudaHostRegisterPortable (for every context of this process) and cudaHostRegisterMapped (kernels may use the address).
_PORTABLE_AND_MAPPED = 1 | 2
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


def register(cudart: Any, array: npt.NDArray[np.uint8]) -> None:
    """Pin the memory under ``array``; doing so twice is fine. ``cudart`` is ``torch.cuda.cudart()``.

    Raises TransportError when the driver refuses, mostly for the limit on locked memory.
    """
    code = int(cudart.cudaHostRegister(array.ctypes.data, array.nbytes, _PORTABLE_AND_MAPPED))
    if code not in (0, _ALREADY_REGISTERED):
        raise TransportError(f"cudaHostRegister of {array.nbytes} bytes failed with code {code}: see ulimit -l")


def unregister(cudart: Any, array: npt.NDArray[np.uint8]) -> None:
    """Unpin it again, before it is unmapped; not pinned is fine. Raises TransportError when the driver refuses."""
    code = int(cudart.cudaHostUnregister(array.ctypes.data))
    if code not in (0, _NOT_REGISTERED):
        raise TransportError(f"cudaHostUnregister of {array.nbytes} bytes failed with code {code}")
