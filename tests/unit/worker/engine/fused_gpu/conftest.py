"""One interpreter process for all tests of this folder."""

from tests.unit.worker.kernels.conftest import interpreter

__all__ = ["interpreter"]
