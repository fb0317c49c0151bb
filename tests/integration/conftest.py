"""Fixtures of several integration tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from shared.memory import unlink_all


@pytest.fixture
def prefix() -> Iterator[str]:
    """A prefix for shared segments that nobody else uses; what is left of it goes at the end."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    unlink_all(name)
