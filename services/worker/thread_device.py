"""The GPU of a thread.

torch's operations go by their tensors, but kernels are launched on the thread's own device, which is the first GPU
unless the thread sets another. Has not run on a GPU.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

# torch leaves these functions without types.
_cuda: Any = torch.cuda


def use_device(device: torch.device) -> None:
    """Make ``device`` this thread's; no effect on a CPU."""
    if device.type == "cuda":
        _cuda.set_device(device)


def have_threads_use(device: torch.device) -> None:
    """Make ``device`` that of the running event loop's worker threads and of this thread."""
    use_device(device)
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=partial(use_device, device))
    )
