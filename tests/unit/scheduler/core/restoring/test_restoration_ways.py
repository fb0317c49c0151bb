"""What is fetched for a request, by the setting ``restoring`` and by what is known of costs."""

import pytest
from msgspec import structs

from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import FetchChunks
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of, timer_of
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_in_store, put_on_disk
from tests.unit.scheduler.core.restoring_cells import SLOW_DISK, bring, put_hidden, restores


def forms(cell: CellModel) -> list[str]:
    """The forms of all fetches so far."""
    return [order.form for order in orders_of(cell, FetchChunks)]


@pytest.mark.parametrize(
    ("restoring", "expected"), [("planned", [HIDDEN]), (HIDDEN, [HIDDEN]), ("kv", ["kv"]), ("recompute", [])]
)
def test_the_setting_says_which_form_is_fetched(
    make_restoring_cell: MakeCell, restoring: str, expected: list[str]
) -> None:
    """The disk has both, and hidden states are half the bytes."""
    cell = make_restoring_cell(restoring=restoring)
    put_on_disk(cell, prompt(3))
    put_hidden(cell, prompt(3))

    cell.submit(prompt(3))

    assert forms(cell) == expected
    cell.drain()


def test_hidden_states_are_fetched_before_kv_is_shared_where_it_must_be(make_restoring_cell: MakeCell) -> None:
    """With ``hidden``, a fetch of KV of the same chunks for another is nothing to join."""
    cell = make_restoring_cell(restoring=HIDDEN, defer_tokens=0)
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))
    put_hidden(cell, prompt(3))

    cell.submit(prompt(3, tail=4))

    assert forms(cell) == ["kv", HIDDEN]
    cell.drain()


@pytest.mark.parametrize("has_both", [True, False])
def test_where_computing_is_faster_nothing_is_fetched(make_restoring_cell: MakeCell, has_both: bool) -> None:
    """The worker's profile says so; the request does not wait."""
    cell = make_restoring_cell(costs=SLOW_DISK)
    put_on_disk(cell, prompt(3))
    if has_both:
        put_hidden(cell, prompt(3))

    name = cell.submit(prompt(3))

    assert forms(cell) == []
    assert cell.state.counters["restorations_planned_recompute"] == 1
    assert [order.request_id for order in cell.admitted] == [name]


def test_behind_a_queue_the_disk_costs_nothing(make_restoring_cell: MakeCell) -> None:
    """Computing would be faster, but the worker has other things to do until the fetch is over."""
    cell = make_restoring_cell(costs=structs.replace(SLOW_DISK, link_bytes_per_us=1e6), max_running=1)
    for kind in (1, 2):
        put_on_disk(cell, prompt(3, kind=kind))
    cell.submit(prompt(3, kind=2))
    assert forms(cell) == []

    cell.submit(prompt(3))

    assert forms(cell) == ["kv"]
    cell.drain()


def test_kv_is_fetched_whatever_it_costs_where_that_is_asked_for(make_restoring_cell: MakeCell) -> None:
    """``kv`` is for comparing: it weighs nothing."""
    cell = make_restoring_cell(costs=SLOW_DISK, restoring="kv")
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    assert forms(cell) == ["kv"]


def test_without_a_profile_kv_is_fetched_as_ever(make_cell: MakeCell) -> None:
    """Nothing can be weighed, so nothing is refused."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100)
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    assert forms(cell) == ["kv"]
    assert cell.state.counters["restorations_planned_kv"] == 1


@pytest.mark.parametrize(
    ("disk_bytes_per_s", "expected"), [(100.0, []), (1e9, ["kv"]), (0.0, ["kv"])], ids=["slow", "fast", "unknown"]
)
def test_without_a_profile_a_disk_of_known_speed_is_weighed(
    make_cell: MakeCell, disk_bytes_per_s: float, expected: list[str]
) -> None:
    """Models with grouped queries have no profile: what the cell has observed of computing is enough."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100, disk_bytes_per_s=disk_bytes_per_s)
    cell.state.workers["worker-0"].speed.note_compute(1000, 0, 1000 * 50)
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    assert forms(cell) == expected


def test_hidden_states_go_on_where_the_kv_ends(make_restoring_cell: MakeCell) -> None:
    """One chunk is there as KV and the other two as hidden states: both are fetched, in turn."""
    cell = make_restoring_cell(restoring="planned")
    put_on_disk(cell, prompt(1))
    names = put_hidden(cell, prompt(3))
    del cell.state.storages["storage"].hidden.chunks[names[0]]

    cell.serve(prompt(3))

    assert forms(cell) == ["kv", HIDDEN]
    assert cell.admitted[0].cached_tokens == CHUNK
    assert (restores(cell)[0].start, restores(cell)[-1].end) == (CHUNK, 3 * CHUNK)


def test_too_few_hidden_states_are_not_fetched(make_restoring_cell: MakeCell) -> None:
    """A chunk is less than ``min_prefetch_tokens`` here."""
    cell = make_restoring_cell(min_prefetch_tokens=CHUNK + 1)
    put_hidden(cell, prompt(1))

    cell.submit(prompt(1))

    assert forms(cell) == []


def test_a_worker_that_cannot_project_gets_no_hidden_states(make_restoring_cell: MakeCell) -> None:
    """Its model does not allow it: what others of its node saved is of no use to it."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))
    cell.restoration = structs.replace(COSTS, hidden=0)
    cell.lose_worker("worker-0")
    cell.add_worker("worker-9", pages=64)

    cell.submit(prompt(3))

    assert forms(cell) == []
    cell.drain()


def test_who_may_not_read_the_cache_gets_no_hidden_states(make_restoring_cell: MakeCell) -> None:
    """Neither form is fetched for it."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))

    cell.submit(prompt(3), read=False)

    assert forms(cell) == []


def test_an_object_store_is_asked_where_nothing_else_is_known(make_restoring_cell: MakeCell) -> None:
    """What it may have cannot be weighed; it is asked as without costs, for hidden states and then for KV."""
    cell = make_restoring_cell(has_remote=True, costs=SLOW_DISK)
    put_in_store(cell, prompt(3))

    cell.serve(prompt(3))

    assert forms(cell) == [HIDDEN, "kv"]
    assert cell.admitted[-1].remote_tokens == 3 * CHUNK


def test_how_wrong_a_fetch_of_kv_was_predicted_is_written_down(make_restoring_cell: MakeCell) -> None:
    """With the batch that loads it; only where it was predicted at all."""
    cell = make_restoring_cell(restoring="planned")
    put_on_disk(cell, prompt(3))
    name = cell.submit(prompt(3))
    assert cell.state.fetches[1].predicted_us > 0

    bring(cell, 4)

    assert present(cell.state.requests[name].prefetch.kv).tokens == 3 * CHUNK
    cell.drain()


@pytest.mark.parametrize("wait", ["best_effort", "deadline", "full"])
def test_how_long_is_waited_is_as_for_kv(make_restoring_cell: MakeCell, wait: str) -> None:
    """``best_effort`` waits for no part that is not there; a deadline ends the wait of the others."""
    cell = make_restoring_cell(prefetch_wait=wait)
    put_hidden(cell, prompt(3))

    name = cell.submit(prompt(3))

    if wait == "best_effort":
        assert [order.request_id for order in cell.admitted] == [name]
        assert cell.state.requests[name].hidden.run is None
    else:
        assert cell.state.requests[name].wait.fetch
    if wait == "deadline":
        cell.fire(timer_of(cell, "prefetch."))
        assert [order.request_id for order in cell.admitted] == [name]
    cell.drain()
