"""Workers of this process whose steps a test holds back, so that no answer ends before what must happen first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.worker.compute import Computed, StepComputer

HELD_S = 120.0


@contextmanager
def held_steps() -> Iterator[threading.Event]:
    """Hold back every step of every worker until the event is set, which the end of the block does as well."""
    may_go, compute = threading.Event(), StepComputer.compute

    def held(self: StepComputer, *arguments: Any) -> list[Computed]:
        assert may_go.wait(HELD_S)
        return compute(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepComputer, "compute", held)
        try:
            yield may_go
        finally:
            may_go.set()
