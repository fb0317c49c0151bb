"""Trials of what was slow: when they are due, what they may cost, and that they end what they are for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.restoring.exploration import MOST_COST, TRIED_EVERY, find_trial, is_overruling
from services.scheduler.core.restoring.restoration_choice import Choice, Prices, Ways, choose
from services.scheduler.core.state import Storage
from services.scheduler.core.tiers.under_way import Fetching
from shared.messages.cell_events import CellConfigured
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import FetchChunks
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of
from tests.unit.scheduler.core.fetching import CHUNK, prompt, put_in_store, put_on_disk
from tests.unit.scheduler.core.restoring.test_restoration_choice import layout, prices, ways
from tests.unit.scheduler.core.restoring_cells import SLOW_DISK, put_hidden, restoring_cell

ENDLESS = float("inf")

Fetched = Callable[[CellModel], list[tuple[str, int]]]
"""(Form, chunks) of every fetch so far."""


@pytest.fixture
def cell_that(make_cell: MakeCell) -> MakeCell:
    """A cell whose disk has hidden states and KV of a prompt, and is thought to read so many bytes a microsecond."""

    def make(
        bytes_per_us: float, *, has_hidden: bool = True, has_kv: bool = True, due: bool = True, **settings: Any
    ) -> CellModel:
        cell = restoring_cell(make_cell, **settings)
        if has_kv:
            put_on_disk(cell, prompt(6))
        if has_hidden:
            put_hidden(cell, prompt(6))
        storage = cell.state.storages["storage"]
        storage.fetching.disk_rate.note(1000.0, 1000.0 / bytes_per_us)
        storage.fetching.overruled = TRIED_EVERY - 1 if due else 0
        return cell

    return make


@pytest.fixture
def fetched() -> Fetched:
    """(Form, chunks) of every fetch so far."""

    def find(cell: CellModel) -> list[tuple[str, int]]:
        found = orders_of(cell, FetchChunks)
        return [(order.form, len(order.identities) // 16 // 2) for order in found]

    return find


def disk(bytes_per_s: float = 0.0) -> Storage:
    """A storage that named this limit."""
    return Storage(
        storage_id="storage",
        incarnation="1",
        node="node",
        host_bytes=1,
        fetching=Fetching(disk_bytes_per_s=bytes_per_s),
    )


def trial_of(held: Prices, way: Ways, *, least: int = 1, left_us: float = ENDLESS) -> Choice | None:
    """The trial that there is in the place of the winner."""
    return find_trial(held, way, choose(held, way), step=CHUNK, least=least, left_us=left_us)


def test_a_slow_disk_overrules_what_its_limit_would_allow() -> None:
    """Below the limit a fetch would have won; at a rate no slower than it, computing wins by itself."""
    slow, way = prices(disk=1.0), ways(kv=10)

    assert choose(slow, way).form == "recompute"
    assert is_overruling(disk(), slow, way, choose(slow, way))
    assert not is_overruling(disk(1e6), slow, way, choose(slow, way))


def test_slow_restoring_overrules_the_profile() -> None:
    """Hidden states lost to KV, or to computing, by what restoring was seen to take."""
    for way in (ways(hidden=10), ways(kv=10, hidden=10)):
        held = prices(layout(), disk=20.0, restored=1000.0)
        choice = choose(held, way)

        assert choice.form == ("kv" if way.kv_end else "recompute")
        assert is_overruling(disk(20e6), held, way, choice)
        assert present(trial_of(replace(held, restored_us=450.0), way)).form == "hidden"


def test_what_wins_without_observations_overrules_nothing() -> None:
    """Neither where nothing is there, nor where the profile says the same, nor where hidden states win."""
    assert not is_overruling(disk(), prices(disk=1.0), ways(), choose(prices(disk=1.0), ways()))
    slow_by_profile = prices(disk=1.0, token=1e-6)
    assert not is_overruling(disk(), slow_by_profile, ways(kv=10), choose(slow_by_profile, ways(kv=10)))
    held, way = prices(layout(), disk=10.0), ways(kv=10, hidden=10)
    assert choose(held, way).form == "hidden"
    assert not is_overruling(disk(), held, way, choose(held, way))


def test_a_trial_is_the_best_of_the_others() -> None:
    """Of two forms that both lose, the one that loses by less; all of it where that is affordable."""
    held, way = prices(layout(), disk=2.0), ways(kv=10, hidden=10)
    assert choose(held, way).form == "recompute"

    trial = trial_of(held, way)

    assert trial is not None
    assert (trial.form, trial.is_trial, trial.end) == ("hidden", True, 10 * CHUNK)


@pytest.mark.parametrize("rate", [2.0, 1.0, 0.5, 0.3])
def test_a_trial_costs_a_bounded_part_of_the_winner(rate: float) -> None:
    """The slower the disk is thought to be, the less of the run is brought."""
    held, way = prices(disk=rate), ways(kv=10)
    winner = choose(held, way)

    trial = trial_of(held, way)

    assert trial is not None
    assert trial.total_us <= MOST_COST * winner.total_us
    chunks = trial.end // CHUNK
    assert 0 < chunks <= 10
    if chunks < 10:
        longer = ways(kv=min(10, 2 * chunks + 1))
        assert prices(disk=rate).kv(longer)[0] + held.computing(longer.kv_end, way.tokens) > MOST_COST * winner.total_us


def test_there_is_no_trial_where_a_chunk_costs_too_much() -> None:
    """A disk that is thought to stand still."""
    assert trial_of(prices(disk=1e-4), ways(kv=10)) is None


def test_there_is_no_trial_of_less_than_is_worth_a_fetch() -> None:
    """``min_prefetch_tokens`` holds for trials."""
    held = prices(disk=0.5)

    assert present(trial_of(held, ways(kv=10))).end < 5 * CHUNK
    assert trial_of(held, ways(kv=10), least=5 * CHUNK) is None


def test_a_deadline_bounds_a_trial() -> None:
    """What would break it is not tried."""
    held, way = prices(disk=1.0), ways(kv=10)

    assert trial_of(held, way, left_us=1.0) is None
    assert present(trial_of(held, way, left_us=choose(held, way).total_us * 1.5)).end < present(trial_of(held, way)).end


def test_every_thirty_second_decision_is_a_trial(cell_that: MakeCell, fetched: Fetched) -> None:
    """The others compute, and are counted for this disk."""
    cell = cell_that(0.004, has_hidden=False, due=False)
    storage = cell.state.storages["storage"]

    for number in range(TRIED_EVERY - 1):
        cell.submit(prompt(6), max_tokens=1, write=False)
        cell.cancel(f"request-{number + 1}")
        assert storage.fetching.overruled == number + 1
    assert fetched(cell) == []
    cell.submit(prompt(6))

    assert fetched(cell) == [("kv", 6)]
    assert (cell.state.counters["restorations_explored"], storage.fetching.overruled) == (1, 0)
    cell.drain()


def test_a_disk_that_got_faster_is_used_again(cell_that: MakeCell, fetched: Fetched) -> None:
    """What the trial brings says so: the next request fetches without being one."""
    cell = cell_that(0.004, has_hidden=False)
    cell.serve(prompt(6))
    for _ in range(3):  # The trial's own speed, which was that of a sound disk, outweighs what was known before.
        cell.state.storages["storage"].fetching.disk_rate.note(6 * 512.0, 60.0)
    put_on_disk(cell, prompt(6, kind=2))

    cell.submit(prompt(6, kind=2))

    assert fetched(cell) == [("kv", 6), ("kv", 6)]
    assert cell.state.counters["restorations_explored"] == 1


def test_a_trial_brings_no_more_than_it_may_cost(cell_that: MakeCell, fetched: Fetched) -> None:
    """Of hidden states neither: the run goes no further than its goal, though the disk has more."""
    cell = cell_that(0.0003, has_kv=False)

    name = cell.submit(prompt(6))

    ((form, chunks),) = fetched(cell)
    assert (form, 0 < chunks < 6) == (HIDDEN, True)
    assert (
        present(cell.state.requests[name].hidden.run).further,
        present(cell.state.requests[name].hidden.run).goal,
    ) == (
        "goal",
        chunks * CHUNK,
    )
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == chunks * CHUNK
    assert cell.state.counters["restorations_explored"] == 1


def test_a_trial_that_has_no_room_stays_due(cell_that: MakeCell, fetched: Fetched) -> None:
    """Nothing was tried: the next decision may."""
    cell = cell_that(0.002, has_kv=False, hidden_pages=2)

    cell.submit(prompt(6))

    assert fetched(cell) == []
    assert cell.state.storages["storage"].fetching.overruled == TRIED_EVERY - 1
    assert "restorations_explored" not in cell.state.counters
    cell.drain()


def test_a_request_with_a_deadline_that_a_trial_would_break_is_spared(cell_that: MakeCell, fetched: Fetched) -> None:
    """It computes; one that has time enough is taken for the trial."""
    cell = cell_that(0.004, has_hidden=False)

    cell.submit(prompt(6), deadline_ms=1)
    assert fetched(cell) == []
    cell.drain()
    put_on_disk(cell, prompt(6, kind=2))
    cell.submit(prompt(6, kind=2), deadline_ms=1_000_000)

    assert fetched(cell) == [("kv", 6)]
    cell.drain()


def test_where_the_profile_says_that_computing_is_faster_nothing_is_tried(
    cell_that: MakeCell, fetched: Fetched
) -> None:
    """No observation speaks against it."""
    cell = cell_that(1e6, costs=SLOW_DISK)

    cell.submit(prompt(6))

    assert fetched(cell) == []
    assert cell.state.storages["storage"].fetching.overruled == TRIED_EVERY - 1


def test_a_trial_of_kv_does_not_ask_the_object_store_besides(cell_that: MakeCell, fetched: Fetched) -> None:
    """It is of what the disk has; of what follows nothing is known that could be tried."""
    cell = cell_that(0.004, has_hidden=False, has_remote=True)
    cell.feed(CellConfigured(config=structs.replace(cell.state.config, hidden_form="off")))
    put_in_store(cell, prompt(9))

    cell.submit(prompt(9))

    assert fetched(cell) == [("kv", 6)]
    cell.drain()
