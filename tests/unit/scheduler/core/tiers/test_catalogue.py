"""What the scheduler believes of a storage's disk."""

import pytest

from services.scheduler.core.cache.page_pool import new_pool
from services.scheduler.core.state import CellState, Storage, new_state
from services.scheduler.core.tiers.catalogue import chunks_added, chunks_gone, has_lower_tiers, is_hidden_kept
from services.scheduler.core.tiers.under_way import DiskTier
from shared.chunks import chunk_bytes
from shared.messages.pools import HIDDEN, PoolHandle
from tests.stateful.cell_model import geometry
from tests.stateful.model_hidden import hidden_geometry


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


@pytest.fixture
def state() -> CellState:
    """A state that knows a geometry."""
    found = new_state()
    found.geometry = geometry(16)
    return found


@pytest.fixture
def storage() -> Storage:
    """A storage whose disk has room for three chunks."""
    return Storage("storage", "one", "node", 0, disk=DiskTier(budget_bytes=3 * chunk_bytes(geometry(16)) + 100))


def test_chunks_are_known_until_they_are_gone(state: CellState, storage: Storage) -> None:
    """Repeats and strangers are harmless."""
    chunks_added(state, storage, names(1, 2, 1))
    chunks_gone(state, storage, names(2, 9))

    assert list(storage.disk.chunks) == [names(1)]


def test_a_disk_holds_no_more_than_its_budget(state: CellState, storage: Storage) -> None:
    """Beyond it what was named first is forgotten."""
    chunks_added(state, storage, names(1, 2, 3, 4, 5))

    assert list(storage.disk.chunks) == [names(3), names(4), names(5)]
    assert state.counters["catalogue_overflow_chunks"] == 2


def test_names_that_are_cut_off_are_ignored(state: CellState, storage: Storage) -> None:
    """A message of a broken length changes nothing."""
    chunks_added(state, storage, names(1) + b"x")
    chunks_added(state, storage, names(2))
    chunks_gone(state, storage, names(2)[:-1])

    assert list(storage.disk.chunks) == [names(2)]


def keep_hidden(storage: Storage) -> None:
    """Give a storage a hidden pool."""
    found = hidden_geometry(16)
    storage.hidden.handle = PoolHandle(kind="shm", layout="page_first", name="", nbytes=0, pages=4, geometry=found)
    storage.hidden.pool = new_pool(4)


def test_forms_are_known_apart(state: CellState, storage: Storage) -> None:
    """One name may stand for KV, for hidden states, or for both; what goes in one form stays in the other."""
    keep_hidden(storage)
    chunks_added(state, storage, names(1, 2))
    chunks_added(state, storage, names(1, 3), HIDDEN)
    chunks_gone(state, storage, names(1), "kv")

    assert (list(storage.disk.chunks), list(storage.hidden.chunks)) == ([names(2)], [names(1), names(3)])
    chunks_gone(state, storage, names(1, 2, 3), HIDDEN)
    assert (list(storage.disk.chunks), list(storage.hidden.chunks)) == ([names(2)], [])


def test_more_hidden_chunks_fit_than_of_kv(state: CellState, storage: Storage) -> None:
    """Each form is bounded by its own size; here a hidden state has half the bytes of KV."""
    keep_hidden(storage)
    chunks_added(state, storage, names(*range(9)), HIDDEN)

    assert list(storage.hidden.chunks) == [names(number) for number in range(3, 9)]
    assert state.counters["catalogue_overflow_chunks"] == 3


def test_without_a_hidden_pool_hidden_states_are_of_no_use(state: CellState, storage: Storage) -> None:
    """Nobody could say of which geometry it is, so it is not remembered."""
    chunks_added(state, storage, names(1), HIDDEN)

    assert storage.hidden.chunks == {}
    assert not has_lower_tiers(storage)


def test_hidden_states_are_kept_once_they_are_on_their_way(state: CellState, storage: Storage) -> None:
    """Saved or being saved; either is something to fetch from or to wait for."""
    keep_hidden(storage)
    chunks_added(state, storage, names(1), HIDDEN)
    storage.hidden.saving[names(2)] = 7

    assert [is_hidden_kept(storage, names(number)) for number in (1, 2, 3)] == [True, True, False]
    assert has_lower_tiers(storage)


def test_copies_that_can_be_read_in_part_are_known_apart(state: CellState, storage: Storage) -> None:
    """They stand beside the chunk of KV, under its name, and are as many at the most."""
    storage.sparse.is_kept = True
    chunks_added(state, storage, names(1, 2))
    chunks_added(state, storage, names(1, 3, 4, 5), "sparse")
    chunks_gone(state, storage, names(4), "sparse")

    assert (list(storage.disk.chunks), list(storage.sparse.chunks)) == ([names(1), names(2)], [names(3), names(5)])
    assert state.counters["catalogue_overflow_chunks"] == 1
    assert has_lower_tiers(storage)


def test_a_storage_that_keeps_no_such_copies_is_not_believed(state: CellState, storage: Storage) -> None:
    """It did not say so when it joined."""
    chunks_added(state, storage, names(1), "sparse")

    assert storage.sparse.chunks == {}
    assert not has_lower_tiers(storage)
