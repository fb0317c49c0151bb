"""The checks of sparse prefixes find what they are for."""

from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core import check_invariants
from services.scheduler.core.request import Request
from services.scheduler.core.sparse.sparse_invariants import check_sparse
from services.scheduler.core.sparse.sparse_records import SparseChoice
from shared.errors import InvariantViolated
from shared.messages.requests import CacheHints, SubmitRequest
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, put_in_parts, sparse_cell, storage_of


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell in which one lossy request runs and another waits."""
    found = sparse_cell(make_cell, max_running=1)
    put_in_parts(found, prompt(4))
    found.submit(prompt(4), importance=QUARTER, request_id="runs", max_tokens=20, ignore_eos=True)
    found.submit(prompt(4), importance=QUARTER, request_id="waits")
    return found


def exact(submit: SubmitRequest) -> SubmitRequest:
    """The same request, had it not allowed anything."""
    return structs.replace(submit, cache=CacheHints())


def void_choice(request: Request, **changes: Any) -> None:
    request.sparse.choice = structs.replace(present(request.sparse.choice), **changes)


def set_span(request: Request, **changes: Any) -> None:
    request.sparse.span = structs.replace(present(request.sparse.span), **changes)


FAULTS = {
    "runs": [
        lambda request: setattr(request, "submit", exact(request.submit)),
        lambda request: setattr(request.place, "marks", 1),
        lambda request: setattr(request.hidden, "lease", 1),
        lambda request: setattr(request, "computed", CHUNK),
        lambda request: setattr(request, "pages", request.pages[4:]),
        lambda request: setattr(request.sparse, "choice", SparseChoice("storage", 0, b"n" * 16)),
        lambda request: set_span(request, start=PAGE // 2),
        lambda request: set_span(request, start=PAGE),
        lambda request: set_span(request, end=4 * CHUNK - PAGE),
        lambda request: set_span(request, end=5 * CHUNK),
        lambda request: set_span(request, chunks=b""),
        lambda request: set_span(request, pages=b""),
        lambda request: set_span(request, depth=CHUNK),
    ],
    "waits": [
        lambda request: setattr(request, "submit", exact(request.submit)),
        lambda request: setattr(request.sparse, "is_refused", True),
        lambda request: setattr(request.prefetch, "fetch", 1),
        lambda request: setattr(request, "worker_id", ""),
        lambda request: void_choice(request, depth=PAGE),
        lambda request: void_choice(request, chunks=b""),
    ],
}


def test_a_sound_cell_passes(cell: CellModel) -> None:
    """Before anything is broken."""
    assert cell.state.requests["runs"].sparse.span is not None
    assert cell.state.requests["waits"].sparse.choice is not None

    check_invariants(cell.state)


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in FAULTS for number in range(len(FAULTS[name]))])
def test_what_is_wrong_with_a_request_is_found(cell: CellModel, name: str, number: int) -> None:
    """Whatever could make something lossy anybody else's, or lose a page."""
    FAULTS[name][number](cell.state.requests[name])

    with pytest.raises(InvariantViolated):
        check_sparse(cell.state)


def test_who_waits_for_something_lossy_is_found(cell: CellModel) -> None:
    """Nobody may."""
    cell.state.waiters["runs"] = {"waits": CHUNK}

    with pytest.raises(InvariantViolated):
        check_sparse(cell.state)


def test_a_lost_page_is_found(cell: CellModel) -> None:
    """Those beside the page table are the request's own as well."""
    request = cell.state.requests["runs"]
    assert request.sparse.span is not None
    cell.state.workers["worker-0"].pool.free_map[request.sparse.span.pages[0]] = 1

    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)


def test_a_storage_that_remembers_too_much_is_found(cell: CellModel) -> None:
    """Both catalogues and shares are bounded."""
    storage = storage_of(cell)
    storage.sparse.shares.total += 1.0
    with pytest.raises(InvariantViolated):
        check_sparse(cell.state)
    storage.sparse.shares.total -= 1.0
    storage.sparse.is_kept = False

    with pytest.raises(InvariantViolated):
        check_sparse(cell.state)
