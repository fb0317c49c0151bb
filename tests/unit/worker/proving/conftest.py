"""Checkpoints and runners of the engine's tests."""

from tests.unit.worker.engine.conftest import _one_thread, _own_cache, checkpoint, load_runner

__all__ = ["_one_thread", "_own_cache", "checkpoint", "load_runner"]
