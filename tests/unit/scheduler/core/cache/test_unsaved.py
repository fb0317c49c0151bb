"""Paths for which there was no room to save them: in line, bounded, and saved without being used again."""

from collections.abc import Iterable
from typing import Any

import pytest

from services.scheduler.core import check_invariants
from services.scheduler.core.cache import unsaved
from services.scheduler.core.cache.residency import drop_device
from services.scheduler.core.state import Storage
from services.scheduler.core.step import Output, Step
from services.scheduler.core.tiers import saves
from services.scheduler.core.tiers.saves import save_put_off
from shared.errors import InvariantViolated
from shared.messages.base import pack_int32
from shared.messages.storage_events import ChunksSaved
from shared.messages.storage_plans import SaveChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of, worker_runs

DOCUMENTS = [[number] * 200 for number in (3, 4, 5, 6)]
CHUNKS = 3  # Whole ones, of each document.


@pytest.fixture
def cell(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> CellModel:
    """Room for the saves of a single document at a time."""
    monkeypatch.setattr(saves, "SAVING_CHUNKS", CHUNKS)
    return make_cell(page_size=16, pages=128, host_pages=60, disk_chunks=50)


def compute(cell: CellModel, tokens: list[int], **request: Any) -> None:
    """Let a prompt be computed and answered, without the storage carrying anything out."""
    cell.submit(tokens, max_tokens=1, **request)
    worker_runs(cell)


def ordered(cell: CellModel) -> list[bytes]:
    """First tokens of every save ordered so far."""
    return [order.tokens[:4] for order in orders_of(cell, SaveChunks)]


def answer(cell: CellModel, save_id: int, **fields: Any) -> list[Output]:
    """The storage answers a save."""
    incarnation = cell.storages["storage"].incarnation
    return cell.feed(ChunksSaved(storage_id="storage", incarnation=incarnation, save_id=save_id, **fields))


def first_of(documents: Iterable[list[int]]) -> list[bytes]:
    return [pack_int32(tokens[:1]) for tokens in documents]


def storage_of(cell: CellModel) -> Storage:
    return cell.state.storages["storage"]


def test_what_found_no_room_is_saved_in_its_order_without_being_used_again(cell: CellModel) -> None:
    """One answer makes room for the next."""
    for document in DOCUMENTS:
        compute(cell, document)
    before = ordered(cell)
    cell.drain()

    assert before == first_of(DOCUMENTS[:1])
    assert ordered(cell) == first_of(DOCUMENTS)
    assert len(storage_of(cell).disk.chunks) == CHUNKS * len(DOCUMENTS)
    assert storage_of(cell).disk.unsaved == {}
    assert cell.state.counters["saves_put_off_chunks"] == CHUNKS * 3
    assert "saves_refused_chunks" not in cell.state.counters


def test_a_failed_save_does_not_hold_up_the_line(cell: CellModel) -> None:
    """Nothing else would ask for the others; each is tried once."""
    for document in DOCUMENTS[:3]:
        compute(cell, document)
    while cell.state.saves:
        answer(cell, next(iter(cell.state.saves)), error="the disk is full")

    assert ordered(cell) == first_of(DOCUMENTS[:3])
    assert storage_of(cell).disk.unsaved == {}


def test_the_line_is_bounded(cell: CellModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes when it is full is saved at the next use at the earliest; the others keep their places."""
    monkeypatch.setattr(unsaved, "MOST_UNSAVED", 2)
    for document in DOCUMENTS:
        compute(cell, document)
    cell.drain()

    assert ordered(cell) == first_of(DOCUMENTS[:3])
    assert cell.state.counters["saves_refused_chunks"] == 2 * CHUNKS  # Offered when computed, and at the end.


def test_an_end_that_is_evicted_leaves_its_place_to_what_is_above(cell: CellModel) -> None:
    """A question may be gone before there is room; the document that it was about is saved all the same."""
    compute(cell, DOCUMENTS[0])
    compute(cell, [*DOCUMENTS[1], *range(100, 140)])
    compute(cell, [*DOCUMENTS[1], *range(200, 240)])
    places = list(storage_of(cell).disk.unsaved)
    for leaf in [cell.state.tree.nodes[name] for name in places]:
        drop_device(cell.state, leaf, cell.state.workers["worker-0"])
    (document,) = storage_of(cell).disk.unsaved
    cell.drain()

    assert len(places) == 2
    assert document not in places
    assert ordered(cell) == first_of(DOCUMENTS[:2])
    assert len(storage_of(cell).disk.chunks) == 2 * CHUNKS


def test_what_is_evicted_before_its_turn_is_counted(cell: CellModel) -> None:
    """Each chunk once, of every document in line; chunks of one that is saved or being saved are none of them."""
    for document in DOCUMENTS:
        compute(cell, document)
    worker = cell.state.workers["worker-0"]
    lost = [cell.state.tree.nodes[name] for name in list(storage_of(cell).disk.unsaved)[:2]]
    for leaf in lost:
        drop_device(cell.state, leaf, worker)
    cell.drain()

    assert cell.state.counters["saves_lost_chunks"] == CHUNKS * 2
    assert len(storage_of(cell).disk.chunks) == CHUNKS * (len(DOCUMENTS) - 2)
    assert storage_of(cell).disk.unsaved == {}


def test_chunks_of_a_path_are_lost_with_the_node_that_they_end_in(cell: CellModel) -> None:
    """The document above two questions waits on, and is saved."""
    compute(cell, DOCUMENTS[0])
    compute(cell, [*DOCUMENTS[1], *range(100, 164)])
    compute(cell, [*DOCUMENTS[1], *range(200, 264)])
    for leaf in [cell.state.tree.nodes[name] for name in storage_of(cell).disk.unsaved]:
        drop_device(cell.state, leaf, cell.state.workers["worker-0"])
    cell.drain()

    assert cell.state.counters["saves_lost_chunks"] == 2
    assert len(storage_of(cell).disk.chunks) == 2 * CHUNKS


def test_nothing_stands_in_line_for_a_storage_that_is_lost(cell: CellModel) -> None:
    """What it will have below is not known."""
    for document in DOCUMENTS:
        compute(cell, document)
    storage = storage_of(cell)
    assert storage.disk.unsaved
    cell.lose_storage("storage")

    assert storage.disk.unsaved == {}


def test_a_storage_that_comes_back_is_given_what_devices_hold(cell: CellModel) -> None:
    """What was computed while it was away is on its disk without being used again."""
    cell.lose_storage("storage")
    for document in DOCUMENTS:
        compute(cell, document)
    assert ordered(cell) == []
    cell.add_storage("storage", pages=60, disk_chunks=50)
    cell.drain()

    assert ordered(cell) == first_of(reversed(DOCUMENTS))
    assert len(storage_of(cell).disk.chunks) == CHUNKS * len(DOCUMENTS)


@pytest.mark.parametrize("setting", ["selective", "on_evict", "off"])
def test_it_is_not_where_saves_have_other_reasons(cell: CellModel, setting: Any) -> None:
    """Such as reuse, or leaving host memory."""
    cell.state.config = type(cell.state.config)(disk_writes=setting)
    cell.lose_storage("storage")
    compute(cell, DOCUMENTS[0])
    cell.add_storage("storage", pages=60, disk_chunks=50)
    cell.drain()

    assert ordered(cell) == []


def test_when_saves_are_switched_off_the_line_is_given_up(cell: CellModel) -> None:
    """The setting is the operator's."""
    for document in DOCUMENTS:
        compute(cell, document)
    cell.state.config = type(cell.state.config)(disk_writes="off")
    answer(cell, next(iter(cell.state.saves)))

    assert storage_of(cell).disk.unsaved == {}
    assert len(ordered(cell)) == 1


def test_an_answer_starts_no_more_than_a_step_can_bear(cell: CellModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that turn out to be saved already cost their identities all the same."""
    monkeypatch.setattr(saves, "PUT_OFF_A_TURN", 2)
    for document in DOCUMENTS:
        compute(cell, document)
    storage = storage_of(cell)
    saved = dict.fromkeys(list(storage.disk.unsaved)[:3], CHUNKS)  # Nothing whole is left of them.
    storage.disk.unsaved |= saved
    storage.disk.saving, held = {}, storage.disk.saving
    save_put_off(Step(cell.state, cell.seq, cell.time_ns), storage)
    storage.disk.saving = held

    assert len(storage.disk.unsaved) == 1


def test_the_checker_finds_a_path_that_is_gone(cell: CellModel) -> None:
    """Its node would be looked for in vain."""
    storage_of(cell).disk.unsaved[999_999] = 0

    with pytest.raises(InvariantViolated, match="is to save a node that is gone"):
        check_invariants(cell.state)
