"""Hidden leases: who gets one and for what, how it grows, and how it ends."""

from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core.tiers.catalogue import chunks_added, chunks_gone
from shared.chunks import geometry_id
from shared.ids import chain_pages, chain_root
from shared.messages.base import count_int32, pack_int32, unpack_int32
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import HIDDEN
from shared.messages.storage_events import ChunksSaved
from shared.messages.storage_plans import SaveChunks
from shared.messages.worker_events import HiddenSaved, RequestFinished
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.stateful.model_hidden import hidden_geometry
from tests.unit.scheduler.core.cell_fixtures import MakeCell, timer_of, worker_runs
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, chunks_of, prompt
from tests.unit.scheduler.core.saving_hidden import extensions, free_pages, hidden_storage, leases_given, saves

EACH = CHUNK // PAGE


def names_of(tokens: list[int]) -> list[bytes]:
    """The names of a prompt's chunks."""
    return list(chunks_of(tokens))


def test_a_lease_reaches_from_the_root_to_what_decoding_may_complete(make_saving_cell: MakeCell) -> None:
    """Three chunks of prompt, and one that the answer's first room completes; the names of three are known."""
    cell = make_saving_cell()
    cell.submit(prompt(3, tail=0), max_tokens=100, ignore_eos=True)

    (lease,) = leases_given(cell)
    assert lease is not None
    assert (lease.depth, lease.parent) == (0, chain_root(namespace()))
    assert count_int32(lease.pages) == 4 * EACH == 64 - free_pages(cell)
    assert list(hidden_storage(cell).hidden.saving) == names_of(prompt(3))
    cell.drain()
    assert free_pages(cell) == 64


def test_the_last_token_of_an_answer_is_never_computed(make_saving_cell: MakeCell) -> None:
    """Neither is the chunk that it would complete, so nobody leases pages for that."""
    cell = make_saving_cell()
    cell.submit(prompt(1, tail=0), max_tokens=64, ignore_eos=True)

    assert count_int32(present(leases_given(cell)[0]).pages) == EACH


def test_what_is_cached_is_not_captured(make_saving_cell: MakeCell) -> None:
    """A lease begins with the first chunk that the request computes whole, behind the identity before it."""
    cell = make_saving_cell()
    cell.serve(prompt(2, tail=PAGE), max_tokens=1)
    cell.submit([*prompt(2, tail=PAGE), *range(500, 700)], max_tokens=1)

    lease = leases_given(cell)[-1]
    assert lease is not None
    assert lease.depth == 3 * CHUNK  # Half of the third chunk is cached.
    tokens = pack_int32([*prompt(2, tail=PAGE), *range(500, 700)])
    assert lease.parent == chain_pages(chain_root(namespace()), tokens[: 4 * 3 * CHUNK], 4 * PAGE)[-16:]
    cell.drain()


def test_a_lease_goes_on_from_something_known(make_saving_cell: MakeCell) -> None:
    """The next whole chunk begins within the answer, and of that nobody knows a token: it is saved as KV."""
    cell = make_saving_cell()
    cell.serve(prompt(2, tail=PAGE), max_tokens=1)
    cell.serve([*prompt(2, tail=PAGE), 5, 6], max_tokens=200, ignore_eos=True)

    assert leases_given(cell)[-1] is None
    assert len(hidden_storage(cell).disk.chunks) == 3


@pytest.mark.parametrize("form", [HIDDEN, "kv"])
def test_what_is_known_below_is_skipped(make_saving_cell: MakeCell, form: Any) -> None:
    """In either form; the lease begins behind it, though the request computes it again."""
    cell = make_saving_cell(restoring="recompute")
    chunks_added(cell.state, hidden_storage(cell), b"".join(names_of(prompt(3))[:2]), form)
    cell.submit(prompt(3), max_tokens=1)

    assert present(leases_given(cell)[0]).depth == 2 * CHUNK
    cell.drain()


def test_nothing_new_needs_no_lease(make_saving_cell: MakeCell) -> None:
    """All is known, and the answer completes no chunk."""
    cell = make_saving_cell(restoring="recompute")
    chunks_added(cell.state, hidden_storage(cell), b"".join(names_of(prompt(3))), HIDDEN)
    cell.submit(prompt(3), max_tokens=1)

    assert leases_given(cell) == [None]


def test_two_do_not_save_the_same(make_saving_cell: MakeCell) -> None:
    """What another is saving is skipped where it comes first."""
    cell = make_saving_cell(defer_tokens=0)
    cell.submit(prompt(2), max_tokens=1)
    cell.submit([*prompt(2, tail=0), *range(500, 700)], max_tokens=1)

    first, second = leases_given(cell)
    assert first is not None
    assert (first.depth, present(second).depth) == (0, 2 * CHUNK)
    cell.drain()
    assert len(hidden_storage(cell).hidden.chunks) == 5


def test_a_lease_ends_where_anothers_begins(make_saving_cell: MakeCell) -> None:
    """The disk lost what the other went on from."""
    cell = make_saving_cell(defer_tokens=0, restoring="recompute")
    known = b"".join(names_of(prompt(4))[:2])
    chunks_added(cell.state, hidden_storage(cell), known, HIDDEN)
    cell.submit(prompt(4), max_tokens=1)
    chunks_gone(cell.state, hidden_storage(cell), known, HIDDEN)
    cell.submit(prompt(4), max_tokens=1)

    spans = [(present(lease).depth, count_int32(present(lease).pages) // EACH) for lease in leases_given(cell)]
    assert spans == [(2 * CHUNK, 2), (0, 2)]
    cell.drain()
    assert sorted(hidden_storage(cell).hidden.chunks) == sorted(names_of(prompt(4)))


@pytest.mark.parametrize(
    "settings",
    [
        {"disk_writes": "off"},
        {"restoring": "kv"},
        {"host_tier": False},
        {"hidden_form": "off"},
    ],
)
def test_settings_end_leasing(make_saving_cell: MakeCell, settings: dict[str, Any]) -> None:
    """What was a cell that keeps hidden states keeps no more of it; its pool stays."""
    cell = make_saving_cell()
    fields: dict[str, Any] = {"hidden_form": "0/1/0", "lease_tokens": 64} | settings
    config = CellConfig(**fields)
    cell.feed(CellConfigured(config=config))
    cell.serve(prompt(3), max_tokens=1)

    assert leases_given(cell) == [None]


def test_a_request_that_must_leave_no_trace_gets_none(make_saving_cell: MakeCell) -> None:
    """Neither does one whose storage is late with a save."""
    cell = make_saving_cell()
    cell.submit(prompt(3), max_tokens=1, write=False)
    assert leases_given(cell) == [None]

    cell.drain()
    cell.submit(prompt(3, kind=2), max_tokens=1)
    worker_runs(cell)
    cell.fire(timer_of(cell, "save."))
    cell.submit(prompt(3, kind=3), max_tokens=1)

    assert leases_given(cell)[-1] is None
    cell.drain()
    cell.submit(prompt(3, kind=4), max_tokens=1)
    assert leases_given(cell)[-1] is not None


def test_a_worker_that_cannot_restore_saves_no_hidden_states(make_saving_cell: MakeCell) -> None:
    """Its neighbour on the node does."""
    cell = make_saving_cell()
    cell.restoration = None
    cell.lose_worker("worker-0")
    cell.add_worker("worker-1", pages=64)
    cell.submit(prompt(3), max_tokens=1)

    assert leases_given(cell) == [None]


def test_a_form_of_the_disk_that_does_not_pay_any_more_is_only_read(make_saving_cell: MakeCell) -> None:
    """The pool is there for what the disk holds, but it was measured so fast that KV is the better copy."""
    cell = make_saving_cell(hidden_form="auto", disk_bytes_per_s=1e18, shapes=geometry_id(hidden_geometry(PAGE)))
    cell.serve(prompt(3), max_tokens=1)

    assert leases_given(cell) == [None]
    assert len(hidden_storage(cell).disk.chunks) == 3


def test_one_request_gets_a_quarter_of_the_pool(make_saving_cell: MakeCell) -> None:
    """As many whole chunks as that is; what does not fit is saved as KV."""
    cell = make_saving_cell(hidden_pages=4 * EACH * 2)
    cell.serve(prompt(5), max_tokens=1)

    assert count_int32(present(leases_given(cell)[0]).pages) == 2 * EACH
    assert list(hidden_storage(cell).hidden.chunks) == names_of(prompt(5))[:2]
    assert list(hidden_storage(cell).disk.chunks) == names_of(prompt(5))[2:]


def test_without_room_there_is_no_lease(make_saving_cell: MakeCell) -> None:
    """A pool of one chunk is one request's; the next does without."""
    cell = make_saving_cell(hidden_pages=EACH, defer_tokens=0)
    cell.submit(prompt(1), max_tokens=1)
    cell.submit(prompt(1, kind=2), max_tokens=1)

    assert [lease is None for lease in leases_given(cell)] == [False, True]
    assert cell.state.counters["hidden_leases_without_room"] == 1
    cell.drain()
    assert list(hidden_storage(cell).disk.chunks) == names_of(prompt(1, kind=2))


def test_decode_room_brings_pages_along(make_saving_cell: MakeCell) -> None:
    """A long answer is saved chunk by chunk, too."""
    cell = make_saving_cell()
    cell.serve(prompt(1, tail=0), max_tokens=300, ignore_eos=True)

    assert sum(len(pages) for pages in extensions(cell)) == 2 * EACH
    answered = cell.gateways["gateway"].tokens["request-1"]
    assert list(hidden_storage(cell).hidden.chunks) == names_of(prompt(1, tail=0) + answered)[:5]
    assert hidden_storage(cell).disk.chunks == {}
    assert free_pages(cell) == 64


def test_a_lease_that_was_cut_short_is_not_extended(make_saving_cell: MakeCell) -> None:
    """What was computed beyond its end is gone, so pages for what follows would be of no use."""
    cell = make_saving_cell(hidden_pages=8 * EACH)
    cell.serve(prompt(3, tail=0), max_tokens=200, ignore_eos=True)

    assert count_int32(present(leases_given(cell)[0]).pages) == 2 * EACH
    assert not any(extensions(cell))
    assert len(hidden_storage(cell).hidden.chunks) == 2


def finish(cell: CellModel, lease_id: int, *, tokens: bytes = b"", chunks: int = 0) -> list[Any]:
    """The worker answers a lease."""
    incarnation = cell.workers["worker-0"].incarnation
    return cell.feed(
        HiddenSaved(worker_id="worker-0", incarnation=incarnation, lease_id=lease_id, chunks=chunks, tokens=tokens)
    )


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        (9, prompt(9, tail=0)),
        (-1, []),
        (1, prompt(2, tail=0)),
        (2, prompt(1, tail=0)),
        (1, prompt(1, tail=0)[:-1]),
        (1, prompt(1, kind=2, tail=0)),
    ],
)
def test_a_senseless_answer_saves_nothing(make_saving_cell: MakeCell, chunks: int, tokens: list[int]) -> None:
    """More chunks than pages, fewer than none, tokens of another number, or others than those of the prompt."""
    cell = make_saving_cell()
    cell.submit(prompt(3), max_tokens=1)

    finish(cell, 1, chunks=chunks, tokens=pack_int32(tokens))

    assert cell.state.counters["malformed_inputs"] == 1
    assert saves(cell) == []
    assert free_pages(cell) == 64


def test_an_answer_to_nothing_is_ignored(make_saving_cell: MakeCell) -> None:
    """Of an unknown lease, of another worker's, and a second one."""
    cell = make_saving_cell(workers=2)
    cell.submit(prompt(3), max_tokens=1)
    (lease,) = cell.state.leases.values()
    other = next(worker for worker in cell.workers.values() if worker.worker_id != lease.worker_id)

    cell.feed(HiddenSaved(worker_id=other.worker_id, incarnation=other.incarnation, lease_id=lease.lease_id))
    cell.feed(HiddenSaved(worker_id=other.worker_id, incarnation=other.incarnation, lease_id=77))

    assert cell.state.counters["stale_inputs"] == 2
    assert cell.state.leases
    cell.drain()


def test_a_lost_worker_gives_its_pages_back_at_once(make_saving_cell: MakeCell) -> None:
    """Whoever reads them later verifies them; the request begins again elsewhere, with a lease of its own."""
    cell = make_saving_cell(workers=2)
    cell.submit(prompt(3), max_tokens=1)
    (lease,) = cell.state.leases.values()

    cell.lose_worker(lease.worker_id)

    assert not cell.state.leases
    assert hidden_storage(cell).hidden.saving == {}
    assert free_pages(cell) == 64
    cell.drain()
    assert len(hidden_storage(cell).hidden.chunks) == 3


def left_without_an_answer(cell: CellModel) -> None:
    """A request left its worker, which says nothing of its lease."""
    cell.submit(prompt(3), max_tokens=1)
    worker = cell.workers["worker-0"]
    worker.step()
    kept = [message for message in worker.outbox if not isinstance(message, HiddenSaved)]
    assert any(isinstance(message, RequestFinished) for message in kept)
    worker.outbox.clear()
    worker.saved_late.clear()
    for message in kept:
        cell.feed(message)


def test_a_worker_that_never_answers_loses_the_lease(make_saving_cell: MakeCell) -> None:
    """Its deadline runs from when the request left; then others may save those chunks, and KV may take their place."""
    cell = make_saving_cell()
    left_without_an_answer(cell)
    assert len(hidden_storage(cell).hidden.saving) == 3

    cell.fire("lease.1")

    assert cell.state.counters["hidden_leases_expired"] == 1
    assert hidden_storage(cell).hidden.saving == {}
    assert free_pages(cell) == 64
    finish(cell, 1, chunks=3, tokens=pack_int32(prompt(3, tail=0)))
    assert cell.state.counters["stale_inputs"] == 1
    cell.serve(prompt(3), max_tokens=1)
    assert len(hidden_storage(cell).disk.chunks) == 3


def test_hidden_states_that_were_computed_on_something_bad_are_not_saved(make_saving_cell: MakeCell) -> None:
    """A chunk failed: what the attempt computed is dropped in both forms, and the next attempt has its own lease."""
    cell = make_saving_cell(max_batch_tokens=CHUNK)
    cell.submit(prompt(3), max_tokens=1, request_id="failing")
    cell.workers["worker-0"].step()
    cell.workers["worker-0"].fail_next_chunk_of = "failing"
    cell.drain()

    assert cell.state.counters["chunks_failed"] == 1
    first, second = leases_given(cell)
    assert first is not None
    assert (first.depth, present(second).depth) == (0, CHUNK)
    assert (
        sum(count_int32(order.tokens) for order in saves(cell)) + CHUNK * len(hidden_storage(cell).disk.chunks)
        == CHUNK * 3
    )
    assert free_pages(cell) == 64


def test_a_preempted_request_keeps_what_it_had_saved(make_saving_cell: MakeCell) -> None:
    """It leases from there on when it comes back; nothing is saved twice."""
    cell = make_saving_cell(pages=10, max_running=4, defer_tokens=0)
    for kind in (1, 2):
        cell.submit(prompt(1, kind=kind, tail=0), max_tokens=150, ignore_eos=True)
    cell.drain()

    assert cell.state.counters["preemptions"] > 0
    names = [name for order in saves(cell) for name in names_of_order(order)]
    assert len(names) == len(set(names)) == len(hidden_storage(cell).hidden.chunks)
    assert free_pages(cell) == 64


def names_of_order(order: SaveChunks) -> list[bytes]:
    """Chunks of a save."""
    return [order.identities[end - 16 : end] for end in range(16 * EACH, len(order.identities) + 1, 16 * EACH)]


def test_saved_hidden_states_are_not_leased_for_a_second_time(make_saving_cell: MakeCell) -> None:
    """After the answer, the next who computes the same has nothing to save."""
    cell = make_saving_cell(restoring="recompute")
    cell.serve(prompt(3), max_tokens=1)
    storage = hidden_storage(cell)
    assert list(storage.hidden.chunks) == names_of(prompt(3))

    cell.serve(prompt(3), max_tokens=1, read=False)

    assert leases_given(cell)[1] is None
    assert len(saves(cell)) == 1


def test_a_save_that_the_disk_does_not_confirm_is_tried_again(make_saving_cell: MakeCell) -> None:
    """What it does not say that it holds is unknown; so its KV or hidden states are saved anew."""
    cell = make_saving_cell()
    cell.submit(prompt(2), max_tokens=1)
    worker_runs(cell)
    (order,) = saves(cell)
    cell.storages["storage"].inbox.clear()
    cell.storages["storage"].last_plan = hidden_storage(cell).number

    incarnation = cell.storages["storage"].incarnation
    cell.feed(ChunksSaved(storage_id="storage", incarnation=incarnation, save_id=order.save_id, error="full"))

    assert cell.state.counters["hidden_saves_failed"] == 1
    cell.submit(prompt(2), max_tokens=1, read=False)
    worker_runs(cell)
    assert unpack_int32(saves(cell)[-1].tokens) == prompt(2, tail=0)


def test_a_lease_of_an_encrypted_namespace_names_its_key(make_saving_cell: MakeCell) -> None:
    """As the request did."""
    cell = make_saving_cell()
    cell.serve(prompt(2), max_tokens=1, salt="theirs", key_id="5a" * 16)

    (order,) = saves(cell)
    assert order.key_id == "5a" * 16
    assert order.value > 0


def test_profiles_may_differ_in_width(make_saving_cell: MakeCell) -> None:
    """A worker of other hidden states than the pool's leases none of it."""
    cell = make_saving_cell()
    cell.restoration = structs.replace(present(cell.restoration), hidden=2)
    cell.lose_worker("worker-0")
    cell.add_worker("worker-1", pages=64)
    cell.submit(prompt(3), max_tokens=1)

    assert leases_given(cell) == [None]
