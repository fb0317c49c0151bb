"""One interpreter process for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.unit.worker.kernels.interpreted import Interpreter, running_interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with running_interpreter() as running:
        yield running
