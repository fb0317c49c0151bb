"""Graphs that are played by functions, without any of CUDA's rules."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.engine.cuda_capture import Graph


class Played:
    """A graph; ``replay`` is all that it does."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class PlayedCapture:
    """A graph computes its work over what memory holds when it is replayed."""

    def graph_of(self, run: Callable[[], None]) -> Graph:
        run()
        return Played(run)

    def used_bytes(self) -> int:
        return 0
