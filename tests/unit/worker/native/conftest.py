"""Compiled kernels of this package go where those of the engine's tests go."""

from tests.unit.worker.engine.conftest import _one_thread, _own_cache

__all__ = ["_one_thread", "_own_cache"]
