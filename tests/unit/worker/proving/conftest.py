"""Checkpoints and runners of the engine's tests; and processes that prove find the parts that tests list."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worker.engine.conftest import _one_thread, _own_cache, checkpoint, load_runner

__all__ = ["_one_thread", "_own_cache", "checkpoint", "load_runner"]

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session", autouse=True)
def _processes_find_the_tests() -> Iterator[None]:
    """They are started without the working directory among their paths, and the tests are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield
