"""What the scheduler believes of a storage's disk."""

import pytest

from services.scheduler.core.catalogue import chunks_added, chunks_gone
from services.scheduler.core.state import Storage, new_state
from shared.chunks import chunk_bytes
from tests.stateful.cell_model import geometry


def names(*numbers):
    return b"".join(number.to_bytes(16, "big") for number in numbers)


@pytest.fixture
def state():
    """A state that knows a geometry."""
    found = new_state()
    found.geometry = geometry(16)
    return found


@pytest.fixture
def storage():
    """A storage whose disk has room for three chunks."""
    return Storage("storage", "one", "node", 0, disk_bytes=3 * chunk_bytes(geometry(16)) + 100)


def test_chunks_are_known_until_they_are_gone(state, storage):
    """Repeats and strangers are harmless."""
    chunks_added(state, storage, names(1, 2, 1))
    chunks_gone(state, storage, names(2, 9))

    assert list(storage.chunks) == [names(1)]


def test_a_disk_holds_no_more_than_its_budget(state, storage):
    """Beyond it what was named first is forgotten."""
    chunks_added(state, storage, names(1, 2, 3, 4, 5))

    assert list(storage.chunks) == [names(3), names(4), names(5)]
    assert state.counters["catalogue_overflow_chunks"] == 2


def test_names_that_are_cut_off_are_ignored(state, storage):
    """A message of a broken length changes nothing."""
    chunks_added(state, storage, names(1) + b"x")
    chunks_added(state, storage, names(2))
    chunks_gone(state, storage, names(2)[:-1])

    assert list(storage.chunks) == [names(2)]
