"""What reading in part is expected to cost, and what is learned of it."""

from dataclasses import replace

import pytest
from msgspec import structs

from services.scheduler.core.restoring.exploration import TRIED_EVERY, is_sparse_overruled, note_decision
from services.scheduler.core.restoring.restoration_choice import choose
from services.scheduler.core.sparse.sparse_costs import (
    CALL_US,
    FALLBACK_SHARE,
    ReadPrice,
    SparsePrices,
    shares_of_bytes,
    sparse_prices,
)
from services.scheduler.core.state import Storage
from shared.messages.pools import KvGeometry
from shared.messages.sparse_reads import MOST_LAYERS
from tests.present import present
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, answered, put_in_parts, sparse_cell, storage_of
from tests.unit.scheduler.core.restoring.test_restoration_choice import prices, ways

KV = KvGeometry(layers=8, kv_heads=12, head_dim=16, page_size=16, dtype="float16")


CODES = (16 + 4) / (16 * 2)
"""Bytes of a head's key as codes of eight bits with a scale, over those of the key."""


def test_a_part_of_the_bytes_is_read() -> None:
    """Codes of three heads of twelve, and a quarter of K and V; where probes disagree, all keys and V of a quarter."""
    keys, chosen = shares_of_bytes(KV, 0.25, 3)

    assert keys == pytest.approx(CODES / 8 + FALLBACK_SHARE / 2)
    assert chosen == pytest.approx((1 - FALLBACK_SHARE) / 4 + FALLBACK_SHARE / 8)


def test_fewer_heads_than_probes_read_codes_of_all() -> None:
    """Under grouped queries there may be two KV heads in all."""
    few = structs.replace(KV, kv_heads=2)

    assert shares_of_bytes(few, 0.25, 3)[0] == pytest.approx(CODES / 2 + FALLBACK_SHARE / 2)


def test_a_single_head_has_none_to_disagree_with() -> None:
    """Its keys, and what it chose; three heads of six read twice as much, at a tenth of the tokens."""
    few = structs.replace(KV, kv_heads=6)

    assert shares_of_bytes(few, 0.1, 1) == pytest.approx((CODES / 12, 0.1))
    assert sum(shares_of_bytes(few, 0.1, 3)) > 2 * sum(shares_of_bytes(few, 0.1, 1))


def test_keys_of_more_heads_than_copies_have_apart_are_whole() -> None:
    """A setting may ask more than three."""
    assert shares_of_bytes(KV, 0.1, 4)[0] == pytest.approx(4 / 24 + FALLBACK_SHARE / 2)


def price(calls_us: float = 0.0, token_us: float = 1.0, pace: float = 1.0) -> SparsePrices:
    return SparsePrices(0.25, ReadPrice(0.0, 1.0, 0.0), ReadPrice(calls_us, 1.0, token_us, 0.0, pace))


def test_a_pace_divides_calls_and_bytes_alike() -> None:
    """A storage that was seen to take twice the time for one part is expected to, for that part alone."""
    slow = replace(price(100.0, 2.0, 0.5), keys=ReadPrice(10.0, 1.0, 1.0))

    assert (slow.chosen.expecting(50), slow.chosen.reading(50), slow.keys.reading(50)) == (200.0, 400.0, 60.0)
    assert (slow.reading(50), slow.unobserved().reading(50)) == (460.0, 260.0)
    assert (slow.is_slow, slow.unobserved().is_slow) == (True, False)


def test_prices_follow_the_disk(make_cell: MakeCell) -> None:
    """The rate is that of whole chunks, with the limit that the storage named before anything was seen."""
    cell = sparse_cell(make_cell)
    storage, worker = storage_of(cell), cell.state.workers["worker-0"]
    before = sparse_prices(cell.state, worker, storage, QUARTER)
    storage.fetching.disk_rate.note(1.0, 1e3)

    after = sparse_prices(cell.state, worker, storage, QUARTER)

    assert after is not None
    assert after.keys.token_us > present(before).keys.token_us
    assert after.chosen.token_us > present(before).chosen.token_us
    assert cell.state.geometry is not None
    layers = cell.state.geometry.layers
    assert after.chosen.calls_us == present(before).chosen.calls_us == CALL_US * layers
    assert after.keys.calls_us == CALL_US * -(-layers // MOST_LAYERS)


def test_the_pace_is_learned_from_what_reads_took(make_cell: MakeCell) -> None:
    """Expected time over observed time, with each report and for each part; without its parts, both are as fast."""
    cell = sparse_cell(make_cell, importance_caching=False)
    put_in_parts(cell, prompt(4))
    worker = cell.state.workers["worker-0"]
    prices = present(sparse_prices(cell.state, worker, storage_of(cell), QUARTER))
    keys, chosen = prices.keys.expecting(4 * CHUNK), prices.chosen.expecting(4 * CHUNK)
    worker.has_read_parts = True

    answered(cell, prompt(4), importance=QUARTER)
    sparse = storage_of(cell).sparse
    of_keys = round(40 * keys / (keys + chosen))

    assert sparse.keys_pace.per_us(1.0) == pytest.approx(keys / of_keys)
    assert sparse.pace.per_us(1.0) == pytest.approx(chosen / (40 - of_keys))


def test_a_slow_pace_that_alone_speaks_against_it_is_forgotten() -> None:
    """No answer is made lossy to learn; after as many decisions as a trial would take, the pace is neutral again."""
    storage = Storage(storage_id="storage", incarnation="1", node="node", host_bytes=1)
    storage.sparse.pace.note(1.0, 1000.0)
    storage.sparse.keys_pace.note(1.0, 1000.0)
    held = replace(prices(disk=1e-3), sparse=price(pace=1e-3))
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)
    choice = choose(held, way)
    assert choice.form == "recompute"
    assert is_sparse_overruled(held, way, choice)

    for _ in range(TRIED_EVERY - 1):
        note_decision(storage, replace(choice, overrules_sparse=True))
    assert storage.sparse.pace.observations == 1
    note_decision(storage, replace(choice, overrules_sparse=True))

    assert storage.sparse.pace.observations == storage.sparse.overruled == 0
    assert storage.sparse.keys_pace.observations == 0


@pytest.mark.parametrize(("pace", "token_us"), [(1.0, 1e6), (2.0, 1e6), (1e-3, 1e6)])
def test_what_loses_by_itself_is_not_overruled(pace: float, token_us: float) -> None:
    """Nothing that was seen decides it."""
    held = replace(prices(), sparse=price(token_us=token_us, pace=pace))
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)

    assert not is_sparse_overruled(held, way, choose(held, way))
