"""Fixtures for the worker around the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.worker.driven_executor import Driven


@pytest.fixture(autouse=True)
def _own_numbers() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def driven() -> Iterator[Driven]:
    """An executor on the fake model that runs only when told to."""
    made = Driven()
    yield made
    made.close()
