"""What a storage needs of a library that reads another process's memory over a network.

Data goes from memory to memory, past the broker; how to find that memory is told by calls over the broker
(``shared.messages.sharing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import TransportError

Span = tuple[int, int, int]
"""(local address, remote address, bytes)."""


class StuckTransfer(TransportError):
    """A read that could not be ended in time: its local memory may be written to at any later moment."""


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
        """What another process needs to read from here, memory registered so far included."""
        ...

    def connect(self, metadata: bytes) -> str:
        """The name of a peer, for :meth:`read`. Raises TransportError for metadata of no use."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Never raises."""
        ...

    def read(self, peer: str, spans: Sequence[Span], timeout_s: float) -> None:
        """Copy spans of the peer's registered memory into one's own registered memory.

        Raises TransportError when it failed or took too long, and then nothing is written any more; StuckTransfer
        where that cannot be said.
        """
        ...

    def close(self) -> None:
        """End; idempotent."""
        ...
