"""Registers mapped host pools with the CUDA driver, so that copies need no staging and kernels may read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared import logs
from shared.errors import TransportError
from shared.memory.pinned import register, unregister

_log = logs.get_logger("worker")

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class CudaPins:
    """Satisfies :class:`services.worker.kv.host_pools.Pins`."""

    def pin(self, array: npt.NDArray[np.uint8]) -> None:
        """Raises TransportError when the driver refuses, mostly for the limit on locked memory."""
        register(_cuda.cudart(), array)

    def unpin(self, array: npt.NDArray[np.uint8]) -> None:
        """Waits for the device first: a kernel may still read what its stream has been told to."""
        _cuda.synchronize()
        try:
            unregister(_cuda.cudart(), array)
        except TransportError as error:
            _log.warning("host_pool_not_unpinned", reason=error.message)


def cuda_pins(device: torch.device) -> CudaPins | None:
    """Pins for a worker whose model is on this device; None where there is no GPU to pin for."""
    return CudaPins() if device.type == "cuda" and torch.cuda.is_available() else None
