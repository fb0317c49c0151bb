"""What reading in part is expected to cost, and what is learned of it."""

from dataclasses import replace

import pytest
from msgspec import structs

from services.scheduler.core.restoring.exploration import TRIED_EVERY, is_sparse_overruled, note_decision
from services.scheduler.core.restoring.restoration_choice import choose
from services.scheduler.core.sparse.sparse_costs import (
    CALL_US,
    FALLBACK_SHARE,
    SparsePrices,
    share_of_bytes,
    sparse_prices,
)
from services.scheduler.core.state import Storage
from shared.messages.pools import KvGeometry
from tests.present import present
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, answered, put_in_parts, sparse_cell, storage_of
from tests.unit.scheduler.core.restoring.test_restoration_choice import prices, ways

KV = KvGeometry(layers=8, kv_heads=12, head_dim=16, page_size=16, dtype="float16")


def test_a_part_of_the_bytes_is_read() -> None:
    """Keys of three heads of twelve, and a quarter of K and V; where probes disagree, all keys and V of a quarter."""
    agreed, fallen_back = 1 / 8 + 1 / 4, 1 / 2 + 1 / 8

    expected = (1 - FALLBACK_SHARE) * agreed + FALLBACK_SHARE * fallen_back
    assert share_of_bytes(KV, 0.25, 3) == pytest.approx(expected)


def test_never_more_than_everything_is_read() -> None:
    """A ratio of one is not dearer than KV."""
    assert share_of_bytes(KV, 1.0, 3) == 1.0


def test_fewer_heads_than_probes_read_all_keys_at_once() -> None:
    """Under grouped queries there may be two KV heads in all."""
    few = structs.replace(KV, kv_heads=2)

    assert share_of_bytes(few, 0.25, 3) == pytest.approx((1 - FALLBACK_SHARE) * 0.75 + FALLBACK_SHARE * 0.625)


def test_a_single_head_has_none_to_disagree_with() -> None:
    """Its keys, and what it chose: three heads of six cost twice as much, at a tenth of the tokens."""
    few = structs.replace(KV, kv_heads=6)

    assert share_of_bytes(few, 0.1, 1) == pytest.approx(1 / 12 + 0.1)
    assert share_of_bytes(few, 0.1, 3) > 2 * share_of_bytes(few, 0.1, 1)


def test_a_pace_divides_calls_and_bytes_alike() -> None:
    """A storage that was seen to take twice the time is expected to."""
    slow = SparsePrices(ratio=0.25, calls_us=100.0, token_us=2.0, pace=0.5)

    assert (slow.expecting(50), slow.reading(50), slow.unobserved().reading(50)) == (200.0, 400.0, 200.0)


def test_prices_follow_the_disk(make_cell: MakeCell) -> None:
    """The rate is that of whole chunks, with the limit that the storage named before anything was seen."""
    cell = sparse_cell(make_cell)
    storage, worker = storage_of(cell), cell.state.workers["worker-0"]
    before = sparse_prices(cell.state, worker, storage, QUARTER)
    storage.fetching.disk_rate.note(1.0, 1e3)

    after = sparse_prices(cell.state, worker, storage, QUARTER)

    assert after is not None
    assert after.token_us > present(before).token_us
    assert cell.state.geometry is not None
    assert after.calls_us == present(before).calls_us == 2 * CALL_US * cell.state.geometry.layers


def test_the_pace_is_learned_from_what_reads_took(make_cell: MakeCell) -> None:
    """Expected time over observed time, with each report."""
    cell = sparse_cell(make_cell, importance_caching=False)
    put_in_parts(cell, prompt(4))
    worker = cell.state.workers["worker-0"]
    expected = present(sparse_prices(cell.state, worker, storage_of(cell), QUARTER)).expecting(4 * CHUNK)

    answered(cell, prompt(4), importance=QUARTER)

    assert storage_of(cell).sparse.pace.per_us(1.0) == pytest.approx(expected / 40)


def test_a_slow_pace_that_alone_speaks_against_it_is_forgotten() -> None:
    """No answer is made lossy to learn; after as many decisions as a trial would take, the pace is neutral again."""
    storage = Storage(storage_id="storage", incarnation="1", node="node", host_bytes=1)
    storage.sparse.pace.note(1.0, 1000.0)
    held = replace(prices(disk=1e-3), sparse=SparsePrices(ratio=0.25, calls_us=0.0, token_us=1.0, pace=1e-3))
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)
    choice = choose(held, way)
    assert choice.form == "recompute"
    assert is_sparse_overruled(held, way, choice)

    for _ in range(TRIED_EVERY - 1):
        note_decision(storage, replace(choice, overrules_sparse=True))
    assert storage.sparse.pace.observations == 1
    note_decision(storage, replace(choice, overrules_sparse=True))

    assert storage.sparse.pace.observations == storage.sparse.overruled == 0


@pytest.mark.parametrize(("pace", "token_us"), [(1.0, 1e6), (2.0, 1e6), (1e-3, 1e6)])
def test_what_loses_by_itself_is_not_overruled(pace: float, token_us: float) -> None:
    """Nothing that was seen decides it."""
    held = replace(prices(), sparse=SparsePrices(ratio=0.25, calls_us=0.0, token_us=token_us, pace=pace))
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)

    assert not is_sparse_overruled(held, way, choose(held, way))
