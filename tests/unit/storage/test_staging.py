"""Buffers for chunks on their way: bounded, on blocks, used again."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from services.storage.staging import Staging
from shared.errors import CapacityError, ConfigError, InvariantViolated

BLOB = 8192
LONG_S = 30.0


def test_buffers_begin_on_a_block_and_are_writable() -> None:
    """Each is one blob long and may be read into past the page cache."""
    staging = Staging(3 * BLOB + 1, BLOB)

    taken = [staging.take(timeout_s=0) for _ in range(staging.buffers)]

    assert staging.buffers == len(taken) == 3
    for buffer in taken:
        buffer[:] = b"x" * BLOB
        assert np.frombuffer(buffer, np.uint8).ctypes.data % 4096 == 0


def test_no_more_than_the_budget_is_in_use() -> None:
    """Past the bound a taker waits, and hears CapacityError when its time is over."""
    staging = Staging(2 * BLOB, BLOB)
    first, _ = staging.take(timeout_s=0), staging.take(timeout_s=0)

    with pytest.raises(CapacityError):
        staging.take(timeout_s=0.01)

    staging.give_back(first)
    assert staging.take(timeout_s=0) is first
    assert staging.taken == 2


def test_a_waiter_gets_what_comes_back() -> None:
    """Giving back wakes one who waits."""
    staging = Staging(BLOB, BLOB)
    taken, got = staging.take(timeout_s=0), []
    waiter = threading.Thread(target=lambda: got.append(staging.take(timeout_s=LONG_S)))
    waiter.start()

    staging.give_back(taken)
    waiter.join(LONG_S)

    assert len(got) == 1
    assert got[0] is taken


def test_a_buffer_comes_back_whatever_happens() -> None:
    """The context manager gives back when its body raises, too."""
    staging = Staging(BLOB, BLOB)

    with pytest.raises(ZeroDivisionError), staging.buffer(timeout_s=0):
        raise ZeroDivisionError

    assert staging.taken == 0


def test_only_what_was_taken_is_taken_back() -> None:
    """A buffer of somebody else, or the same one twice, is a fault in the program."""
    staging = Staging(BLOB, BLOB)
    taken = staging.take(timeout_s=0)
    staging.give_back(taken)

    for stranger in (taken, memoryview(bytearray(BLOB))):
        with pytest.raises(InvariantViolated):
            staging.give_back(stranger)


def test_closing_ends_all_waiting() -> None:
    """Who waits hears CapacityError at once, and what is still in use can be given back."""
    staging = Staging(BLOB, BLOB)
    taken, errors = staging.take(timeout_s=0), []

    def wait() -> None:
        try:
            staging.take(timeout_s=LONG_S)
        except CapacityError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    staging.close()
    waiter.join(LONG_S)
    staging.give_back(taken)

    assert len(errors) == 1
    with pytest.raises(CapacityError):
        staging.take(timeout_s=0)


def test_a_budget_below_one_chunk_is_refused() -> None:
    """The operator hears which setting is too small; a size of no whole blocks is a fault in the program."""
    with pytest.raises(ConfigError, match="staging-bytes"):
        Staging(BLOB - 1, BLOB)
    with pytest.raises(InvariantViolated):
        Staging(BLOB, 100)
