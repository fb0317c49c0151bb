"""A NIXL agent of the tests, for engines where NIXL is not installed."""

from __future__ import annotations

import threading
from types import SimpleNamespace


class FakeAgent:
    """Begins reads that copy nothing. Polls return ``state``, once ``gate`` is set."""

    def __init__(self) -> None:
        self.backends = ("UCX",)
        self.state = "PROC"
        self.is_polled = threading.Event()
        self.gate = threading.Event()
        self.added = 0
        self.removed: list[str] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        pass

    def get_xfer_descs(self, spans: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return spans

    def initialize_xfer(self, operation: str, local: object, remote: object, peer: str) -> SimpleNamespace:
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle: object) -> str:
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        self.is_polled.set()
        self.gate.wait(20.0)
        return self.state

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.added += 1
        return metadata

    def remove_remote_agent(self, peer: str) -> None:
        self.removed.append(peer)
