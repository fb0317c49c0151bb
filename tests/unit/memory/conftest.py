"""A prefix of its own for every test, and nothing left in /dev/shm after it."""

import secrets
from collections.abc import Iterator

import pytest

from shared.memory import unlink_all


@pytest.fixture
def shm_prefix() -> Iterator[str]:
    prefix = f"test-{secrets.token_hex(6)}"
    yield prefix
    unlink_all(prefix)
