"""Fixtures for the worker around the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.worker.driven_executor import Driven


@pytest.fixture
def driven() -> Iterator[Driven]:
    """An executor on the fake model that runs only when told to."""
    made = Driven()
    yield made
    made.close()
