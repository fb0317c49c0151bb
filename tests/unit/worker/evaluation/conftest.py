"""Tiny checkpoints, one of them with heads that agree, and runners over small pools."""

from __future__ import annotations

from tests.unit.worker.engine.conftest import _one_thread, _own_cache
from tests.unit.worker.importance.conftest import checkpoint_of, load_runner

__all__ = ["_one_thread", "_own_cache", "checkpoint_of", "load_runner"]
