"""Buffers for chunks on their way: bounded, on blocks, used again."""

from __future__ import annotations

import numpy as np
import pytest

from services.storage.staging import Staging
from shared.errors import CapacityError, ConfigError, InvariantViolated

BLOB = 8192


def test_buffers_begin_on_a_block_and_are_writable() -> None:
    """Each is one blob long and may be read into past the page cache."""
    staging = Staging(3 * BLOB + 1, BLOB)

    taken = [staging.take() for _ in range(staging.buffers)]

    assert staging.buffers == len(taken) == 3
    for buffer in taken:
        buffer[:] = b"x" * BLOB
        assert np.frombuffer(buffer, np.uint8).ctypes.data % 4096 == 0


def test_no_more_than_the_budget_is_in_use() -> None:
    """Past the bound a taker gets CapacityError; what is given back can be taken again."""
    staging = Staging(2 * BLOB, BLOB)
    first, _ = staging.take(), staging.take()

    with pytest.raises(CapacityError):
        staging.take()

    staging.give_back(first)
    assert staging.take() is first
    assert staging.taken == 2


def test_only_what_was_taken_is_taken_back() -> None:
    """A buffer of somebody else, or the same one twice, is a fault in the program."""
    staging = Staging(BLOB, BLOB)
    taken = staging.take()
    staging.give_back(taken)

    for stranger in (taken, memoryview(bytearray(BLOB))):
        with pytest.raises(InvariantViolated):
            staging.give_back(stranger)


def test_a_closed_one_gives_nothing_more() -> None:
    """What is still in use can be given back."""
    staging = Staging(2 * BLOB, BLOB)
    taken = staging.take()
    staging.close()
    staging.give_back(taken)

    with pytest.raises(CapacityError):
        staging.take()


def test_a_budget_below_one_chunk_is_refused() -> None:
    """The operator hears which setting is too small; a size of no whole blocks is a fault in the program."""
    with pytest.raises(ConfigError, match="staging-bytes"):
        Staging(BLOB - 1, BLOB)
    with pytest.raises(InvariantViolated):
        Staging(BLOB, 100)
