"""Saves of hidden states: what one asks for, what it holds until the answer, and what is believed then."""

from typing import Any

import pytest

from services.scheduler.core.hidden import hidden_saves
from services.scheduler.core.step import Output
from services.scheduler.core.tiers.catalogue import chunks_added
from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import HIDDEN
from shared.messages.storage_events import ChunksDropped, ChunksListed, ChunksSaved
from shared.messages.storage_plans import SaveChunks
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, worker_runs
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, chunks_of, prompt
from tests.unit.scheduler.core.saving_hidden import free_pages, hidden_storage, saves

EACH = CHUNK // PAGE


@pytest.fixture
def saving(make_saving_cell: MakeCell) -> CellModel:
    """A cell that has just ordered the hidden states of three chunks to be saved."""
    cell = make_saving_cell()
    cell.submit(prompt(3), max_tokens=1)
    worker_runs(cell)
    return cell


def answer(cell: CellModel, order: SaveChunks, **fields: Any) -> list[Output]:
    """The storage answers a save that it never carried out."""
    storage = cell.storages["storage"]
    storage.inbox.clear()
    storage.last_plan = hidden_storage(cell).number
    message = ChunksSaved(storage_id="storage", incarnation=storage.incarnation, save_id=order.save_id, **fields)
    return cell.feed(message)


def names_of(tokens: list[int]) -> list[bytes]:
    """The names of a prompt's chunks."""
    return list(chunks_of(tokens))


def test_an_order_reads_the_hidden_pool_alone(saving: CellModel) -> None:
    """Whole chunks, their identities from the root, no page of a device."""
    (order,) = saves(saving)

    tokens = pack_int32(prompt(3, tail=0))
    root = chain_root(namespace())
    assert (order.form, order.depth, order.parent, order.worker_id) == (HIDDEN, 0, root, "")
    assert order.tokens == tokens
    assert order.identities == chain_pages(root, tokens, 4 * PAGE)
    assert unpack_int32(order.device_pages) == [-1] * 3 * EACH
    assert set(unpack_int32(order.host_pages)) <= set(range(64))
    assert order.value > 0


def test_pages_are_held_until_the_answer(saving: CellModel) -> None:
    """Those of chunks that were not completed are free before."""
    assert free_pages(saving) == 64 - 3 * EACH

    saving.drain()

    assert free_pages(saving) == 64
    assert list(hidden_storage(saving).hidden.chunks) == names_of(prompt(3))
    assert hidden_storage(saving).hidden.saving == {}
    assert saving.state.counters["hidden_saves_done"] == 1


def test_long_runs_are_cut(make_saving_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order goes on where the one before ends."""
    monkeypatch.setattr(hidden_saves, "ORDER_CHUNKS", 2)
    cell = make_saving_cell()
    cell.submit(prompt(5), max_tokens=1)
    worker_runs(cell)

    orders = saves(cell)
    assert [order.depth // CHUNK for order in orders] == [0, 2, 4]
    assert [order.parent for order in orders[1:]] == [order.identities[-16:] for order in orders[:-1]]
    cell.drain()
    assert list(hidden_storage(cell).hidden.chunks) == names_of(prompt(5))


def test_what_became_known_meanwhile_is_not_saved(make_saving_cell: MakeCell) -> None:
    """Its pages are free at once; what surrounds it makes two orders."""
    cell = make_saving_cell()
    cell.submit(prompt(3), max_tokens=1)
    chunks_added(cell.state, hidden_storage(cell), names_of(prompt(3))[1], HIDDEN)
    worker_runs(cell)

    assert [order.depth // CHUNK for order in saves(cell)] == [0, 2]
    assert free_pages(cell) == 64 - 2 * EACH
    cell.drain()


def test_numbers_are_unique_over_both_forms(make_saving_cell: MakeCell) -> None:
    """A storage's answers name no form."""
    cell = make_saving_cell(hidden_pages=4 * EACH)
    for kind in (1, 2):
        cell.serve(prompt(3, kind=kind), max_tokens=1)

    numbers = [order.save_id for form in ("kv", HIDDEN) for order in saves(cell, form)]
    assert min(len(saves(cell, form)) for form in ("kv", HIDDEN)) > 0
    assert len(set(numbers)) == len(numbers)


def test_no_more_is_ordered_than_a_storage_may_have_before_it(
    make_saving_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is given up, its pages are free, and its KV is saved when somebody uses it again."""
    monkeypatch.setattr(hidden_saves, "SAVING_CHUNKS", 2)
    cell = make_saving_cell()
    cell.submit(prompt(3), max_tokens=1)
    worker_runs(cell)

    assert free_pages(cell) == 64 - 2 * EACH
    assert cell.state.counters["hidden_saves_refused_chunks"] == 1
    cell.drain()
    cell.serve(prompt(3), max_tokens=1)
    assert list(hidden_storage(cell).disk.chunks) == names_of(prompt(3))[2:]


def test_saving_can_be_switched_off_under_a_lease(make_saving_cell: MakeCell) -> None:
    """What was captured is dropped."""
    cell = make_saving_cell()
    cell.submit(prompt(3), max_tokens=1)
    cell.feed(CellConfigured(config=CellConfig(disk_writes="off", hidden_form="0/1/0")))
    worker_runs(cell)

    assert saves(cell) == []
    assert free_pages(cell) == 64


def test_a_late_save_keeps_its_pages_and_stops_others(saving: CellModel) -> None:
    """The storage may still read them. It gets no save in either form before it answers, and is believed then."""
    (order,) = saves(saving)
    saving.fire(f"save.{order.save_id}")

    assert free_pages(saving) == 64 - 3 * EACH
    assert hidden_storage(saving).disk.late_saves == 1
    saving.submit(prompt(2, kind=2), max_tokens=1)
    worker_runs(saving)
    assert saves(saving) == [order]
    assert saves(saving, "kv") == []
    answer(saving, order, chunks=b"".join(names_of(prompt(3))))
    assert hidden_storage(saving).disk.late_saves == 0
    assert free_pages(saving) == 64
    assert len(hidden_storage(saving).hidden.chunks) == 3
    counters = saving.state.counters
    assert (counters["hidden_saves_failed"], counters.get("hidden_saves_done", 0)) == (1, 0)


def test_what_made_room_is_of_the_same_form(saving: CellModel) -> None:
    """KV of the same name stays known; a chunk that is named as saved and dropped is not believed to be there."""
    storage = hidden_storage(saving)
    first, second, third = names_of(prompt(3))
    chunks_added(saving.state, storage, first + second, "kv")
    (order,) = saves(saving)

    answer(saving, order, chunks=first + second + third, dropped=first)

    assert list(storage.hidden.chunks) == [second, third]
    assert list(storage.disk.chunks) == [first, second]


def test_an_answer_of_a_broken_length_frees_the_pages_all_the_same(saving: CellModel) -> None:
    """Nothing of it is believed."""
    (order,) = saves(saving)

    answer(saving, order, chunks=b"x" * 17)

    assert hidden_storage(saving).hidden.chunks == {}
    assert saving.state.counters["malformed_inputs"] == 1
    assert free_pages(saving) == 64


def test_answers_count_once_and_from_whom_was_asked(saving: CellModel) -> None:
    """Another storage's and a second one are ignored."""
    (order,) = saves(saving)
    other = saving.add_storage("other", node="elsewhere")
    saving.feed(ChunksSaved(storage_id="other", incarnation=other.incarnation, save_id=order.save_id))
    assert free_pages(saving) == 64 - 3 * EACH

    answer(saving, order)
    answer(saving, order)

    assert saving.state.counters["stale_inputs"] == 2
    assert free_pages(saving) == 64


def test_kv_is_not_saved_beside_hidden_states(make_saving_cell: MakeCell) -> None:
    """Neither while it is being computed nor when the answer's end is saved."""
    cell = make_saving_cell()
    cell.serve(prompt(2), max_tokens=100, ignore_eos=True)

    assert saves(cell, "kv") == []
    assert len(hidden_storage(cell).hidden.chunks) == 3


def test_where_only_kv_comes_back_only_kv_is_saved(make_saving_cell: MakeCell) -> None:
    """Also of what there are hidden states of."""
    cell = make_saving_cell()
    cell.serve(prompt(2), max_tokens=1)
    cell.feed(CellConfigured(config=CellConfig(restoring="kv", hidden_form="0/1/0")))
    cell.serve(prompt(2), max_tokens=1)

    assert list(hidden_storage(cell).disk.chunks) == names_of(prompt(2))


def test_each_form_is_listed_and_dropped_for_itself(saving: CellModel) -> None:
    """A storage says of which form it speaks."""
    storage = hidden_storage(saving)
    names = names_of(prompt(3, kind=3))
    who: dict[str, Any] = {"storage_id": "storage", "incarnation": storage.incarnation}
    saving.feed(ChunksListed(**who, chunks=b"".join(names), form=HIDDEN))
    saving.feed(ChunksListed(**who, chunks=b"".join(names)))

    saving.feed(ChunksDropped(**who, chunks=names[0], form=HIDDEN))
    saving.feed(ChunksDropped(**who, chunks=names[1]))

    assert list(storage.hidden.chunks) == names[1:]
    assert list(storage.disk.chunks) == [names[0], names[2]]
    saving.drain()
