"""Graphs as CUDA captures them, played by functions: what may not be captured fails, as does a read of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.engine.cuda_capture import Graph
from tests.cuda.flashinfer_stand_in import Machine

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **(kwargs or {}))


class StrictCapture:
    """A graph computes its work over what memory holds when it is replayed, and plans nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.replays = 0

    def graph_of(self, run: Callable[[], None]) -> Graph:
        for _ in range(2):
            run()
        with self._capturing():
            run()
        return _Replayed(self, run)

    def used_bytes(self) -> int:
        return 0

    def replay(self, run: Callable[[], None]) -> None:
        self.replays += 1
        with self._capturing():
            run()

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self._machine.is_capturing = True
        try:
            with _NoReads():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._machine.is_capturing = False


class _Replayed:
    def __init__(self, capture: StrictCapture, run: Callable[[], None]) -> None:
        self._capture, self._run = capture, run

    def replay(self) -> None:
        self._capture.replay(self._run)
