"""What a storage needs of a library that reads another process's memory over a network.

Data goes from memory to memory, past the broker; how to find that memory is told by calls over the broker
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
    """A read that was not over in time, and goes on: nothing cuts it off. Until ``is_over()`` its local memory may be
    written to at any moment.
    """

    def __init__(self, message: str, is_over: Callable[[], bool]) -> None:
        super().__init__(message)
        self.is_over = is_over


class TransferEngine(Protocol):
    """Calls block, and may come from any thread."""

    @property
    def name(self) -> str:
        """Of the library: both sides need the same."""
        ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Open this memory for reads by others, and for its own. It must outlive the engine.

        Raises TransportError.
        """
        ...

    def metadata(self) -> bytes:
        """Return what another process needs to read from here, memory registered so far included."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Return the name of a peer, for :meth:`read`. Raises TransportError for metadata of no use."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer, when its late reads are over. Never raises."""
        ...

    def read(self, peer: str, spans: Sequence[Span], timeout_s: float) -> None:
        """Copy spans of the peer's registered memory into one's own registered memory.

        Raises TransportError when it failed, and then nothing is written any more; LateRead when it took too long.
        """
        ...

    def close(self) -> None:
        """End; idempotent."""
        ...
