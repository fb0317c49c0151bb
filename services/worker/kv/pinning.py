"""Registration of mapped host pools with the CUDA driver, so that copies need no staging and kernels may read them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.thread_device import use_device
from shared import logs
from shared.errors import TransportError
from shared.memory.cuda_runtime import loaded_runtime
from shared.memory.pinned import PinnedMemory

_log = logs.get_logger("worker")

# torch leaves these functions without types.
_cuda: Any = torch.cuda

_MEMORY = PinnedMemory(loaded_runtime)


class CudaPins:
    """Satisfies :class:`services.worker.kv.mapped_pools.Pins`.

    Pinning whole pools takes minutes, on a thread of its own.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare the pinning thread, whose current CUDA device is ``device``; it starts with the first work."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="pinning", initializer=partial(use_device, device))

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` behind earlier work, beside the calling thread."""
        self._threads.submit(work)

    def finish(self) -> None:
        """Return when all started work is done; no more may be started."""
        self._threads.shutdown(wait=True)

    def pin(self, array: npt.NDArray[np.uint8]) -> None:
        """Pin the memory. Raises TransportError when the driver refuses, mostly for the limit on locked memory."""
        _MEMORY.register(array)

    def unpin(self, array: npt.NDArray[np.uint8]) -> None:
        """Unpin the memory. Waits for the device first: a kernel may still read it."""
        try:
            _cuda.synchronize()
            _MEMORY.unregister(array)
        except (TransportError, RuntimeError) as error:
            _log.warning("host_pool_not_unpinned", reason=str(error))


def cuda_pins(device: torch.device) -> CudaPins | None:
    """Return the pins for a worker whose model is on this device; None on a CPU."""
    return CudaPins(device) if device.type == "cuda" and torch.cuda.is_available() else None
