"""Claims of GPUs: one worker on each, because pools are sized by free memory and would starve one another.

A claim is a socket whose name, outside the file system, is the GPU's UUID. The kernel releases it when the process ends
in any way, and processes that number GPUs differently name the same one. Containers with a network of their own do not
see it; there the orchestrator that assigns GPUs has to keep them apart.
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
