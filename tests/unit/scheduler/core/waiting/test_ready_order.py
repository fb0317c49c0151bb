"""Which of the requests that are ready begin alike."""

import pytest

from services.scheduler.core.queue.queue_invariants import check_queues
from services.scheduler.core.waiting.fair_share import opened_by
from shared.errors import InvariantViolated
from shared.messages.base import pack_int32
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell

PAGE = [1, 2, 3, 4]


@pytest.fixture
def worker(make_cell: MakeCell) -> CellModel:
    """A worker whose only place is taken, and four that wait: two begin alike, one reads no cache, one is too short."""
    cell = make_cell(pages=60, max_running=1)
    cell.submit([9] * 8, max_tokens=8, request_id="ahead")
    cell.submit(PAGE + [5] * 4, request_id="a")
    cell.submit(PAGE + [6] * 4, request_id="b")
    cell.submit(PAGE + [7] * 4, request_id="c", read=False)
    cell.submit(PAGE[:3], request_id="d")
    return cell


def alike(cell: CellModel) -> list[str]:
    """Who begins with PAGE."""
    return list(opened_by(cell.state.workers["worker-0"], [pack_int32(PAGE)]))


def test_requests_that_begin_with_a_page_are_found_by_it(worker: CellModel) -> None:
    """What may reuse nothing, and what has no whole page, stands on no load."""
    assert alike(worker) == ["a", "b"]
    assert list(opened_by(worker.state.workers["worker-0"], [pack_int32([8] * 4)])) == []


def test_a_request_that_leaves_the_line_is_found_no_more(worker: CellModel) -> None:
    """With the last one goes the page."""
    worker.cancel("a")
    assert alike(worker) == ["b"]
    worker.cancel("b")

    assert pack_int32(PAGE) not in worker.state.workers["worker-0"].line.openings


def test_an_index_that_lost_a_request_is_no_state(worker: CellModel) -> None:
    """Checked from scratch: a bundle hit would be missed for ever."""
    del worker.state.workers["worker-0"].line.openings[pack_int32(PAGE)]["b"]

    with pytest.raises(InvariantViolated, match="begin"):
        check_queues(worker.state)
