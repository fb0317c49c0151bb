"""What workers say of sparse prefixes, sensible or not."""

from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core import decode_state, encode_state
from shared.messages.requests import Importance
from shared.messages.worker_events import BatchDone, SparseLoaded
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, put_in_parts, sparse_cell, storage_of


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell with a lossy request whose first chunk is under way."""
    found = sparse_cell(make_cell)
    put_in_parts(found, prompt(4))
    found.submit(prompt(4), importance=QUARTER, max_tokens=20, ignore_eos=True)
    return found


def answer(cell: CellModel, **changes: Any) -> None:
    """The worker's answer to the batch, with other words about the sparse prefix."""
    worker = cell.workers["worker-0"]
    worker.step()
    done = worker.outbox.popleft()
    assert isinstance(done, BatchDone)
    (loaded,) = done.sparse_loaded
    cell.feed(structs.replace(done, sparse_loaded=(structs.replace(loaded, **changes),)))


def test_what_was_read_is_counted(cell: CellModel) -> None:
    """Tokens of the prefix, and bytes of the disk."""
    answer(cell, disk_bytes=777)

    assert cell.state.counters["sparse_tokens_read"] == 256
    assert cell.state.counters["sparse_disk_bytes"] == 777
    assert len(storage_of(cell).sparse.shares.by_name) == 4


def test_shares_of_other_chunks_are_not_believed(cell: CellModel) -> None:
    """A byte for each chunk, no more and no less."""
    answer(cell, shares=b"\x01\x02")

    assert cell.state.counters["malformed_inputs"] == 1
    assert not storage_of(cell).sparse.shares.by_name


@pytest.mark.parametrize("changes", [{"attempt": 7}, {"request_id": "stranger"}])
def test_what_is_said_of_another_attempt_is_nothing_new(cell: CellModel, changes: dict[str, int | str]) -> None:
    """It left while the step was under way."""
    answer(cell, **changes)

    assert "malformed_inputs" not in cell.state.counters
    assert not storage_of(cell).sparse.shares.by_name


def test_times_that_cannot_be_teach_nothing(cell: CellModel) -> None:
    """Nor do bytes below zero."""
    cell.state.workers["worker-0"].has_read_parts = True

    answer(cell, read_us=-5, disk_bytes=-5)

    assert storage_of(cell).sparse.pace.observations == 0
    assert cell.state.counters["sparse_disk_bytes"] == 0


@pytest.mark.parametrize(("keys_us", "of_keys"), [(0, 1), (300, 300), (2000, 1000)])
def test_each_part_of_a_read_is_learned_by_itself(cell: CellModel, keys_us: int, of_keys: int) -> None:
    """Keys that computation did not wait for leave all of the wait to the chosen tokens; no part exceeds the whole."""
    span = present(cell.state.requests[next(iter(cell.state.requests))].sparse.span)
    cell.state.workers["worker-0"].has_read_parts = True

    answer(cell, read_us=1000, keys_us=keys_us)

    sparse = storage_of(cell).sparse
    assert sparse.keys_pace.per_us(1.0) == pytest.approx(span.expected_keys_us / of_keys)
    assert sparse.pace.per_us(1.0) == pytest.approx(span.expected_us / max(1, 1000 - keys_us))


def test_the_first_read_of_a_worker_teaches_no_pace(cell: CellModel) -> None:
    """It makes and maps memory, once: by its time no prefix would be read in part for the next 32 decisions."""
    answer(cell, read_us=10**9, keys_us=10**9)
    sparse = storage_of(cell).sparse
    first = sparse.pace.observations, sparse.keys_pace.observations
    cell.drain()
    cell.serve(prompt(4, kind=3), max_tokens=1)
    put_in_parts(cell, prompt(4, kind=5))
    cell.submit(prompt(4, kind=5), importance=QUARTER, max_tokens=20, ignore_eos=True)

    answer(cell)

    assert first == (0, 0)
    assert (sparse.pace.observations, sparse.keys_pace.observations) == (1, 1)
    cell.drain()


def test_an_exact_request_cannot_be_reported_sparse(cell: CellModel) -> None:
    """A worker that mixes requests up is not believed."""
    exact = cell.submit(prompt(1, kind=9), max_tokens=20, ignore_eos=True)
    said = SparseLoaded(request_id=exact, attempt=1, shares=b"\x01" * 4, disk_bytes=1, read_us=1)
    worker = cell.workers["worker-0"]
    worker.step()
    done = worker.outbox.popleft()

    cell.feed(structs.replace(done, sparse_loaded=(said,)))

    assert cell.state.counters["malformed_inputs"] == 1
    cell.drain()


@pytest.mark.parametrize("importance", [QUARTER, None])
def test_steps_behind_a_sparse_prefix_say_nothing_of_computing(
    make_cell: MakeCell, importance: Importance | None
) -> None:
    """They wait for the disk and attend to less than the depth of their tokens says; so does each later chunk."""
    cell = sparse_cell(
        make_cell, max_batch_tokens=20, batches_ahead=1, restoring="planned" if importance else "recompute"
    )
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(4, tail=50), importance=importance, max_tokens=1)
    worker = cell.workers["worker-0"]

    for _ in range(2):
        worker.step()
        done = worker.outbox.popleft()
        cell.feed(structs.replace(done, compute_us=5000, computed_tokens=20))

    assert cell.state.workers["worker-0"].speed.reports == (0 if importance else 2)
    cell.drain()


def test_a_snapshot_carries_all_of_it(cell: CellModel) -> None:
    """The sparse prefix of a running request, its pages, and what was learned."""
    answer(cell, disk_bytes=777)

    data = encode_state(cell.state)
    cell.state = decode_state(data)

    assert encode_state(cell.state) == data
    cell.drain()
    assert cell.state.workers["worker-0"].pool.leased == 0
