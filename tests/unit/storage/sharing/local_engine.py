"""An engine of the tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.storage.sharing.engine import Span
from shared.errors import TransportError


class LocalEngine:
    """Copies within this process; can be told to misbehave."""

    name = "nixl"

    def __init__(self) -> None:
        self.fault: Callable[[], None] = lambda: None
        self.connecting: Callable[[], None] = lambda: None
        self.connections = 0
        self.reads = 0
        self.disconnected: list[str] = []
        self.refusals = 0
        """How often memory is yet to be refused."""

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise TransportError("NIXL_ERR_BACKEND")

    def metadata(self) -> bytes:
        return b"peer"

    def connect(self, metadata: bytes) -> str:
        self.connecting()
        self.connections += 1
        return metadata.decode()

    def disconnect(self, peer: str) -> None:
        self.disconnected.append(peer)

    def read(self, peer: str, spans: Sequence[Span], timeout_s: float) -> None:
        self.reads += 1
        self.fault()
        for here, there, nbytes in spans:
            ctypes.memmove(here, there, nbytes)

    def close(self) -> None:
        pass
