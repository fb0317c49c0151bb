"""What an object store is asked for, of which nothing is known beforehand: which form first, and how it ends."""

from typing import Any, Protocol

import pytest
from msgspec import structs

from services.scheduler.core.step import Output
from shared.messages.cell_events import CellConfigured
from shared.messages.pools import HIDDEN
from shared.messages.storage_events import ChunksFetched
from shared.messages.storage_plans import CancelFetch, FetchChunks
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, timer_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_in_store, put_on_disk
from tests.unit.scheduler.core.restoring_cells import (
    SLOW_DISK,
    bring,
    bring_at_once,
    hidden_pool,
    put_hidden,
    put_hidden_in_store,
    restores,
    restoring_cell,
    rot_hidden,
    storage_obeys,
)

EACH = CHUNK // PAGE


class Asked(Protocol):
    """(Form, first token, chunks) of every fetch so far, from an input on."""

    def __call__(self, cell: CellModel, since: int = 0) -> list[tuple[str, int, int]]: ...


@pytest.fixture
def cell_that(make_cell: MakeCell) -> MakeCell:
    """A cell that keeps hidden states, with an object store."""
    return lambda **settings: restoring_cell(make_cell, **{"has_remote": True} | settings)


@pytest.fixture
def asked() -> Asked:
    """(Form, first token, chunks) of every fetch so far, from an input on."""

    def find(cell: CellModel, since: int = 0) -> list[tuple[str, int, int]]:
        found = orders_of(cell, FetchChunks, since=since)
        return [(order.form, order.depth, len(order.host_pages) // 4 // EACH) for order in found]

    return find


def say(cell: CellModel, **fields: Any) -> list[Output]:
    """A ChunksFetched of the only fetch of hidden states there is."""
    (fetch_id,) = cell.state.hidden_fetches
    who: dict[str, Any] = {"storage_id": "storage", "incarnation": cell.storages["storage"].incarnation}
    return cell.feed(ChunksFetched(**who, fetch_id=fetch_id, **fields))


def kv_cell(cell: CellModel) -> None:
    """From now on the cell saves KV, though it has a pool for hidden states."""
    cell.feed(CellConfigured(config=structs.replace(cell.state.config, hidden_form="off")))


def test_hidden_states_that_only_the_store_has_are_restored(cell_that: MakeCell, asked: Asked) -> None:
    """A node that knows of nothing restores what another has kept."""
    cell = cell_that()
    put_hidden_in_store(cell, prompt(3))

    cell.serve(prompt(3))

    assert asked(cell) == [(HIDDEN, 0, 3)]
    assert cell.workers["worker-0"].restored_tokens == 3 * CHUNK
    assert (cell.workers["worker-0"].prefilled_tokens, hidden_pool(cell).leased) == (3, 0)


def test_another_node_restores_what_the_first_one_saved(cell_that: MakeCell, asked: Asked) -> None:
    """Its hidden states went to the object store as they were saved; of the first node nothing is left."""
    cell = cell_that(disk_writes="through")
    cell.serve(prompt(3), max_tokens=1)
    assert cell.state.counters["saved_hidden_chunks"] == 3
    cell.lose_worker("worker-0")
    cell.lose_storage("storage")
    cell.add_storage("elsewhere", node="node-b", pages=40, disk_chunks=100, has_remote=True, hidden_pages=64)
    cell.add_worker("worker-b", node="node-b", pages=64)
    cell.drain()
    since = len(cell.outputs)

    cell.serve(prompt(3))

    assert asked(cell, since) == [(HIDDEN, 0, 3)]
    assert cell.workers["worker-b"].restored_tokens == 3 * CHUNK


def test_a_few_chunks_are_asked_for_and_then_the_rest(cell_that: MakeCell, asked: Asked) -> None:
    """Sixteen at first; once they came, as many as one fetch may bring."""
    cell = cell_that(hidden_pages=100 * EACH, pages=128)
    put_hidden_in_store(cell, prompt(20))

    cell.serve(prompt(20))

    assert asked(cell) == [(HIDDEN, 0, 16), (HIDDEN, 16 * CHUNK, 4)]
    assert cell.workers["worker-0"].restored_tokens == 20 * CHUNK


def test_a_run_ends_where_the_store_has_no_more(cell_that: MakeCell, asked: Asked) -> None:
    """What follows is computed; nothing is refused, asked for twice or kept."""
    cell = cell_that(hidden_pages=100 * EACH, pages=128)
    put_hidden_in_store(cell, prompt(20), chunks=18)

    cell.serve(prompt(20))

    assert asked(cell) == [(HIDDEN, 0, 16), (HIDDEN, 16 * CHUNK, 4)]
    assert cell.workers["worker-0"].restored_tokens == 18 * CHUNK
    assert "hidden_fetches_failed" not in cell.state.counters
    assert hidden_pool(cell).leased == 0


def test_a_small_pool_is_used_again_and_again(cell_that: MakeCell) -> None:
    """Half of it holds two chunks; all of the prompt is restored through it."""
    cell = cell_that(hidden_pages=4 * EACH)
    put_hidden_in_store(cell, prompt(8))

    cell.serve(prompt(8))

    assert cell.workers["worker-0"].restored_tokens == 8 * CHUNK
    assert hidden_pool(cell).leased == 0


def test_how_far_hidden_states_go_is_waited_for(cell_that: MakeCell) -> None:
    """What comes of a question is not used before it is answered: the part that is missing can be saved then."""
    cell = cell_that()
    put_hidden_in_store(cell, prompt(3), chunks=2)
    name = cell.submit(prompt(3))

    bring(cell, 1)
    assert cell.admitted == []
    assert cell.state.requests[name].wait.fetch
    bring(cell, 2)

    assert [order.request_id for order in cell.admitted] == [name]
    assert present(cell.state.requests[name].hidden.run).goal == 2 * CHUNK
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == 2 * CHUNK


def test_the_end_of_a_question_is_heard_after_its_last_part(cell_that: MakeCell) -> None:
    """Who waits for the answer goes on with it, though nothing new has come."""
    cell = cell_that()
    put_hidden_in_store(cell, prompt(3), chunks=2)
    name = cell.submit(prompt(3))
    bring_at_once(cell, 2)
    assert cell.state.requests[name].wait.fetch

    bring(cell, 1)

    assert [order.request_id for order in cell.admitted] == [name]
    cell.drain()


@pytest.mark.parametrize("saves_kv", [False, True])
def test_what_nobody_has_seen_is_asked_for_in_both_forms_and_computed(
    cell_that: MakeCell, asked: Asked, saves_kv: bool
) -> None:
    """First in the one that the cell saves; each ends with one word of the storage."""
    cell = cell_that()
    if saves_kv:
        kv_cell(cell)

    name = cell.submit(prompt(3))
    storage_obeys(cell)
    bring(cell, 1)
    assert cell.state.requests[name].hidden.refusals == 0
    cell.drain()

    expected = [("kv", 0, 3), (HIDDEN, 0, 3)] if saves_kv else [(HIDDEN, 0, 3), ("kv", 0, 3)]
    assert asked(cell) == expected
    assert cell.admitted[-1].cached_tokens == 0
    assert cell.state.counters["store_questions_in_vain"] == 1
    assert "restores_refused" not in cell.state.counters
    assert hidden_pool(cell).leased == 0


def test_hidden_states_are_found_where_the_cell_saves_kv(cell_that: MakeCell, asked: Asked) -> None:
    """The store has KV of the first chunk, and hidden states of the others: a question of KV that ends short goes on
    in it.
    """
    cell = cell_that()
    kv_cell(cell)
    put_in_store(cell, prompt(1))
    put_hidden_in_store(cell, prompt(3))

    cell.serve(prompt(3))

    assert asked(cell) == [("kv", 0, 3), (HIDDEN, CHUNK, 2)]
    assert cell.admitted[-1].remote_tokens == CHUNK
    assert cell.workers["worker-0"].restored_tokens == 2 * CHUNK


def test_behind_kv_of_the_disk_hidden_states_are_asked_for(cell_that: MakeCell, asked: Asked) -> None:
    """What is known is fetched as it is known; the store is asked for the rest."""
    cell = cell_that()
    put_on_disk(cell, prompt(1))
    put_hidden_in_store(cell, prompt(3))

    cell.serve(prompt(3))

    assert asked(cell) == [("kv", 0, 1), (HIDDEN, CHUNK, 2)]
    assert cell.workers["worker-0"].restored_tokens == 2 * CHUNK


@pytest.mark.parametrize(
    ("restoring", "expected"),
    [("kv", [("kv", 0, 3)]), (HIDDEN, [(HIDDEN, 0, 3)]), ("recompute", [])],
)
def test_the_setting_says_what_may_be_asked_for(
    cell_that: MakeCell,
    asked: Asked,
    restoring: str,
    expected: list[tuple[str, int, int]],
) -> None:
    """``kv`` never asks for hidden states, and ``hidden`` for nothing else."""
    cell = cell_that(restoring=restoring)

    cell.serve(prompt(3))

    assert asked(cell) == expected


def test_without_a_pool_kv_is_asked_for_as_ever(make_cell: MakeCell, asked: Asked) -> None:
    """Hidden states have nowhere to go, whatever the setting."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, has_remote=True, costs=COSTS, restoring=HIDDEN)

    cell.submit(prompt(3))

    assert asked(cell) == [("kv", 0, 3)]


def test_a_worker_that_cannot_project_asks_for_kv(cell_that: MakeCell, asked: Asked) -> None:
    """Hidden states of all layers are of no use to it."""
    cell = cell_that()
    cell.restoration = structs.replace(COSTS, hidden=0)
    cell.lose_worker("worker-0")
    cell.add_worker("worker-9", pages=64)

    cell.serve(prompt(3))

    assert asked(cell) == [("kv", 0, 3)]


def test_too_little_is_not_asked_for(cell_that: MakeCell, asked: Asked) -> None:
    """A chunk is less than ``min_prefetch_tokens`` here."""
    cell = cell_that(min_prefetch_tokens=CHUNK + 1)

    cell.submit(prompt(1))

    assert asked(cell) == []


def test_hidden_states_of_the_disk_are_not_asked_for_behind_their_end(cell_that: MakeCell, asked: Asked) -> None:
    """A question would hold up the restoration of what is there."""
    cell = cell_that()
    put_hidden(cell, prompt(3), chunks=2)
    put_hidden_in_store(cell, prompt(3))

    cell.serve(prompt(3))

    assert asked(cell) == [(HIDDEN, 0, 2)]


def test_who_shares_a_prefix_asks_once_for_all(cell_that: MakeCell, asked: Asked) -> None:
    """The others wait for the answer, and take it for their own: neither form is asked for twice."""
    cell = cell_that(max_running=4)

    for tail in (3, 4, 5):
        cell.submit(prompt(3, tail=tail))
    cell.drain()

    assert asked(cell) == [(HIDDEN, 0, 3), ("kv", 0, 3)]


def test_who_shares_a_prefix_is_restored_once_for_all(cell_that: MakeCell, asked: Asked) -> None:
    """The others find what the first has restored."""
    cell = cell_that(max_running=4)
    put_hidden_in_store(cell, prompt(3))

    for tail in (3, 4, 5):
        cell.submit(prompt(3, tail=tail))
    cell.drain()

    assert asked(cell) == [(HIDDEN, 0, 3)]
    assert [order.device_tokens for order in cell.admitted] == [0, 3 * CHUNK, 3 * CHUNK]


def test_without_room_a_request_is_looked_at_again_and_goes_on_with_kv(cell_that: MakeCell, asked: Asked) -> None:
    """A pool of one chunk lends none of it."""
    cell = cell_that(hidden_pages=EACH, max_running=1)
    put_in_store(cell, prompt(3))
    cell.submit([9] * 10, max_tokens=20)

    name = cell.submit(prompt(3))
    assert (asked(cell), cell.state.requests[name].prefetch.is_due) == ([], True)
    cell.drain()

    assert asked(cell) == [("kv", 0, 3)]


def test_the_second_form_is_given_up_for_a_while(cell_that: MakeCell, asked: Asked) -> None:
    """After eight prompts of which it brought nothing one in eight asks for it, and after the first hit each again."""
    cell = cell_that()

    for kind in range(1, 18):
        cell.serve(prompt(1, kind=kind))
    found = [form for form, _, _ in asked(cell)]
    assert (found.count(HIDDEN), found.count("kv")) == (17, 8 + 2)
    assert cell.state.counters["store_questions_spared"] == 7

    since = len(cell.outputs)
    cell.state.storages["storage"].fetching.blanks.kv = 24
    put_in_store(cell, prompt(1, kind=20))
    for kind in (20, 21):
        cell.serve(prompt(1, kind=kind))
    assert [form for form, _, _ in asked(cell, since)] == [HIDDEN, "kv"] * 2


def test_a_question_that_came_whole_is_answered_by_its_end(cell_that: MakeCell) -> None:
    """All parts are there before the storage says that it is over; the request goes on with that word."""
    cell = cell_that()
    put_hidden_in_store(cell, prompt(2))
    name = cell.submit(prompt(2))
    say(cell, chunks=2, is_over=False)
    assert cell.state.requests[name].wait.fetch

    say(cell, chunks=2, is_over=True)

    assert [order.request_id for order in cell.admitted] == [name]
    assert (
        present(cell.state.requests[name].hidden.run).further,
        present(cell.state.requests[name].hidden.run).goal,
    ) == (
        "store",
        2 * CHUNK,
    )


def test_who_follows_waits_as_long_as_who_asks(cell_that: MakeCell) -> None:
    """A part has arrived, and neither is admitted: how far it goes is not known yet."""
    cell = cell_that(max_running=4)
    put_hidden_in_store(cell, prompt(3))
    cell.submit(prompt(3))
    other = cell.submit(prompt(3, tail=4))

    bring(cell, 1)

    assert cell.admitted == []
    assert cell.state.requests[other].wait.fetch
    cell.drain()


def test_kv_that_could_not_be_read_is_not_ordered_again(cell_that: MakeCell, asked: Asked) -> None:
    """The disk is still thought to have it, and the object store is asked for its hidden states."""
    cell = cell_that()
    put_on_disk(cell, prompt(3))
    put_hidden_in_store(cell, prompt(3))
    cell.submit(prompt(3))
    storage_obeys(cell)
    cell.storages["storage"].fetch(error="made to fail")

    cell.drain()

    assert asked(cell) == [("kv", 0, 3), (HIDDEN, 0, 3)]
    assert cell.workers["worker-0"].restored_tokens == 3 * CHUNK


def test_what_was_learned_of_the_store_is_forgotten_with_admission(cell_that: MakeCell) -> None:
    """A request that starts again later, or elsewhere, asks again: others may have kept it since."""
    cell = cell_that(max_running=1)
    cell.submit([9] * 10, max_tokens=20)
    name = cell.submit(prompt(3))
    storage_obeys(cell)
    for _ in range(2):
        bring(cell, 1)
    request = cell.state.requests[name]
    assert (request.prefetch.lacks.hidden_from, request.prefetch.lacks.kv_from) == (0, 0)

    cell.lose_worker("worker-0")
    assert (request.prefetch.lacks.hidden_from, request.prefetch.lacks.kv_from) == (-1, -1)

    cell.add_worker("worker-1", pages=64)
    cell.submit(prompt(3, kind=2))
    while not any(order.request_id == name for order in cell.admitted):
        cell.round()
    assert (request.prefetch.lacks.hidden_from, request.prefetch.lacks.kv_from) == (-1, -1)
    cell.drain()


def test_best_effort_waits_for_no_answer(cell_that: MakeCell) -> None:
    """A question is called off when its request could run, and its pages come back."""
    cell = cell_that(prefetch_wait="best_effort")
    put_hidden_in_store(cell, prompt(3))

    name = cell.submit(prompt(3))

    assert [order.request_id for order in cell.admitted] == [name]
    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    cell.drain()
    assert hidden_pool(cell).leased == 0


def test_a_wait_that_is_over_uses_what_has_come(cell_that: MakeCell) -> None:
    """With ``deadline``; the answer is not waited for any more."""
    cell = cell_that(prefetch_wait="deadline")
    put_hidden_in_store(cell, prompt(3))
    name = cell.submit(prompt(3))
    bring(cell, 1)
    cell.fire(timer_of(cell, "prefetch."))

    assert [order.request_id for order in cell.admitted] == [name]
    assert present(cell.state.requests[name].hidden.run).arrived == CHUNK
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == 3 * CHUNK


def test_an_answer_that_is_late_is_a_fault(cell_that: MakeCell) -> None:
    """The storage let the deadline pass: the request computes, and its hidden states are not asked for again."""
    cell = cell_that()
    put_hidden_in_store(cell, prompt(3))
    name = cell.submit(prompt(3))
    cell.fire(timer_of(cell, "fetch."))

    assert [order.request_id for order in cell.admitted] == [name]
    assert cell.state.requests[name].hidden.refusals == 1
    cell.drain()
    assert restores(cell) == []


def test_what_the_store_has_is_not_taken_for_the_disks_speed(cell_that: MakeCell) -> None:
    """Neither form teaches the rate of the disk, and nothing is predicted of a question."""
    cell = cell_that()
    put_hidden_in_store(cell, prompt(3))
    cell.serve(prompt(3))

    assert cell.state.storages["storage"].fetching.disk_rate.observations == 0
    assert cell.state.predictions.by_kind == {}


def test_a_rotten_page_of_the_store_is_refused_like_any(cell_that: MakeCell) -> None:
    """What is restored is verified, wherever it came from; the request computes."""
    cell = cell_that(costs=SLOW_DISK)
    put_hidden_in_store(cell, prompt(2))
    name = cell.submit(prompt(2))
    bring_at_once(cell, 2)
    bring(cell, 1)
    rot_hidden(cell)
    worker_goes_on(cell)

    assert cell.state.requests[name].hidden.refusals == 1
    cell.drain()
    assert hidden_pool(cell).leased == 0
