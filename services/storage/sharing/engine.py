"""The interface to a library that reads another process's memory over a network.

Data goes from memory to memory, past the broker; the location of that memory is exchanged by calls over the broker
(``shared.messages.sharing``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import TransportError

Span = tuple[int, int, int]
"""(local address, remote address, bytes)."""


class LateRead(TransportError):
    """A read that did not end in time, and goes on: it cannot be cancelled.

    Until ``is_over()`` its local memory may be written to at any moment.
    """

    def __init__(self, message: str, is_over: Callable[[], bool]) -> None:
        """Keep ``is_over``, which the owner of the local memory polls until it returns True."""
        super().__init__(message)
        self.is_over = is_over


class TransferEngine(Protocol):
    """Reads of other processes' memory. Calls block, and may come from any thread."""

    @property
    def name(self) -> str:
        """Name of the library: both sides need the same."""
        ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Open this memory for reads by others, and as a target of its own reads. It must outlive the engine.

        Raises TransportError.
        """
        ...

    def metadata(self) -> bytes:
        """Return the data with which another process can read from here, memory registered so far included."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Return the name of a peer, for :meth:`read`. Raises TransportError for unusable metadata."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer, when its late reads are over. Never raises."""
        ...

    def read(self, peer: str, spans: Sequence[Span], timeout_s: float) -> None:
        """Copy spans of the peer's registered memory into this process's registered memory.

        Raises TransportError when it failed, and then nothing is written any more; LateRead when it took too long.
        """
        ...

    def close(self) -> None:
        """End the engine; idempotent."""
        ...
