"""A prefix of its own for every test, and nothing left in /dev/shm after it."""

import secrets
from collections.abc import Iterator

import pytest

from shared.memory import unlink_all
from tests.run_name import RUN


@pytest.fixture
def shm_prefix() -> Iterator[str]:
    prefix = f"{RUN}-{secrets.token_hex(4)}"
    yield prefix
    unlink_all(prefix)
