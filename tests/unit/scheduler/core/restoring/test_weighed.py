"""The ways that were weighed for a request, with the parts of their time, as its explanation tells them."""

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.restoring.restoration_choice import ways_back
from shared.messages.explanations import Admission
from shared.messages.worker_events import BatchDone
from tests.cases import case
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, put_in_parts, sparse_cell, storage_of
from tests.unit.scheduler.core.restoring.test_restoration_choice import in_part, layout, prices, ways


def admission_of(cell: CellModel, name: str) -> Admission:
    return present(cell.state.recollection).admissions[name][-1]


def slow_cell(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> CellModel:
    """A cell whose device and disk are so slow that reading in part is the fastest way."""
    monkeypatch.setattr("services.scheduler.core.sparse.sparse_costs.code_bytes", lambda head_dim: head_dim)
    cell = sparse_cell(make_cell, costs=structs.replace(COSTS, token_us=1e5), **settings)
    put_in_parts(cell, prompt(4))
    storage_of(cell).fetching.disk_rate.note(1.0, 1000.0)
    return cell


@pytest.mark.parametrize("seed", range(30))
def test_parts_add_up_to_the_time_of_their_way(seed: int) -> None:
    """Whatever hides a part of another is a part below 0; only what is hidden makes one."""
    chance = random.Random(seed)
    with case(seed=seed):
        held = prices(
            layout(chance.randint(0, 3), chance.randint(1, 5)),
            disk=10 ** chance.uniform(0, 4),
            queued=chance.choice([0.0, 1e5]),
            link=10 ** chance.uniform(1, 4),
            pair=chance.choice([0.0, 0.01]),
            hidden=1.0,
        )
        held = replace(held, sparse=in_part(), ahead_us=chance.choice([0.0, 1e4]))
        way = ways(chunks=8, kv=chance.randint(1, 6), hidden=chance.randint(1, 6), tail=9)

        for each in ways_back(held, replace(way, sparse_end=8 * CHUNK)):
            told = each.told("kv")

            assert sum(part.us for part in told.parts) == told.us
            assert told.us == pytest.approx(each.total_us, abs=len(told.parts) + 1)  # Each part is rounded.
            assert all((part.us < 0) == (part.name == "overlap") for part in told.parts)
            assert told.is_taken == (each.form == "kv")


def test_an_explanation_tells_why_a_prefix_was_read_in_part(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways with their parts, and how long computation waited for those of the way that was taken."""
    cell = slow_cell(make_cell, monkeypatch)

    name = cell.submit(prompt(4), importance=QUARTER, max_tokens=2)
    weighed = admission_of(cell, name).ways
    worker = cell.workers["worker-0"]
    worker.step()
    done = worker.outbox.popleft()
    assert isinstance(done, BatchDone)
    (loaded,) = done.sparse_loaded
    cell.feed(structs.replace(done, sparse_loaded=(structs.replace(loaded, read_us=50, keys_us=20),)))

    assert [(way.way, way.is_taken) for way in weighed] == [("kv", False), ("recompute", False), ("sparse", True)]
    assert min(weighed, key=lambda way: way.us).way == "sparse"
    (taken,) = (way for way in admission_of(cell, name).ways if way.is_taken)
    took = {part.name: part.took_us for part in taken.parts if part.took_us >= 0}
    assert took == {"keys": 20, "chosen": 30}
    assert {part.name for part in taken.parts if part.nbytes} == {"keys", "chosen"}
    cell.drain()
    assert not present(cell.state.recollection).ways


def test_what_was_weighed_for_an_attempt_is_not_told_of_the_next(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose read was refused is computed or loaded then, and what waits no longer is forgotten."""
    cell = slow_cell(make_cell, monkeypatch)
    cell.workers["worker-0"].fails_sparse_reads = True

    name = cell.serve(prompt(4), importance=QUARTER, max_tokens=1)
    attempts = present(cell.state.recollection).admissions[name]

    assert [way.way for way in attempts[0].ways if way.is_taken] == ["sparse"]
    assert all(way.way != "sparse" for way in attempts[-1].ways if way.is_taken)
    assert not present(cell.state.recollection).ways
