"""One worker has a GPU, whichever way it was started: pools are sized by what is free, and would starve one another.

A claim is a socket whose name, outside the file system, is the GPU's UUID. The kernel lets it go when the process ends,
however that comes, and processes that number GPUs differently mean the same one. Containers with a network of their own
do not see it; what hands GPUs to them sees to it there.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shared.errors import ConfigError


@contextmanager
def claimed(uuids: Sequence[str], prefix: str = "thermocline-gpu-") -> Iterator[None]:
    """Hold these GPUs for the duration of the block. Raises ConfigError when another process has one of them."""
    with ExitStack() as held:
        for uuid in uuids:
            claim = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                claim.bind(f"\0{prefix}{uuid}")
            except OSError as error:
                raise ConfigError(
                    f"GPU {uuid} is another worker's: end that worker, or choose others with --gpu or "
                    "CUDA_VISIBLE_DEVICES"
                ) from error
        yield
