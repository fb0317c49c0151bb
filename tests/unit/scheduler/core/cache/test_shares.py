"""How important chunks proved, and what nodes are worth by it."""

import pytest

from services.scheduler.core.cache import shares
from services.scheduler.core.cache.heat import hotness, worth
from services.scheduler.core.cache.insertion import value_path
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.shares import (
    LEAST_IMPORTANCE,
    MOST_IMPORTANCE,
    ChunkShares,
)
from services.scheduler.policies.thermocline import ThermoclinePolicy
from shared.messages.cell_events import CellConfig, CellConfigured, FlushCache
from tests.unit.scheduler.core.cell_fixtures import MakeCell, path_of
from tests.unit.scheduler.core.fetching import CHUNK, prompt
from tests.unit.scheduler.core.reading_in_part import QUARTER, answered, put_in_parts, sparse_cell, storage_of

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_a_share_is_a_moving_average() -> None:
    """The first read counts as it is, each further one by a quarter."""
    found = ChunkShares()
    found.note([A], bytes([255]))
    found.note([A], bytes([0]))

    assert found.by_name[A].average == pytest.approx(0.75)
    assert found.by_name[A].reads == 2
    assert found.total == pytest.approx(0.75)


def test_the_chunk_read_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read makes a chunk the latest."""
    monkeypatch.setattr(shares, "MOST_CHUNKS", 2)
    found = ChunkShares()
    found.note([A, B], bytes([100, 100]))
    found.note([A], bytes([100]))

    found.note([C], bytes([51]))

    assert list(found.by_name) == [A, C]
    assert found.total == pytest.approx(sum(known.average for known in found.by_name.values()))


def test_importance_is_relative_to_other_chunks() -> None:
    """Twice the share of another is a third more than the average of both."""
    found = ChunkShares()
    found.note([A, B], bytes([100, 50]))

    assert found.importance_of([A]) == pytest.approx(4 / 3)
    assert found.importance_of([B]) == pytest.approx(2 / 3)
    assert found.importance_of([A, B, C]) == pytest.approx(1.0)


def test_what_is_not_known_counts_as_average() -> None:
    """Nodes that nobody read in part are neither favoured nor put back."""
    found = ChunkShares()
    assert found.importance_of([A]) == 1.0
    found.note([B], bytes([0]))

    assert found.importance_of([A]) == found.importance_of([]) == found.importance_of([B]) == 1.0


def test_importance_has_bounds() -> None:
    """One number never outweighs all else that speaks for a node."""
    found = ChunkShares()
    names = [bytes([number]) * 16 for number in range(20)]
    found.note([A, *names], bytes([255] + [1] * 20))

    assert found.importance_of([A]) == MOST_IMPORTANCE
    assert found.importance_of(names[:1]) == LEAST_IMPORTANCE


def test_frequency_and_importance_are_multiplied_as_in_the_paper() -> None:
    """IMPRESS, Figure 14: 1.5 times the frequency and half the important keys lose to the other chunk."""
    found = ChunkShares()
    found.note([A, B], bytes([127, 255]))

    assert 1.5 * found.importance_of([A]) < 1.0 * found.importance_of([B])


def test_a_node_that_comes_is_worth_what_its_chunks_proved(make_cell: MakeCell) -> None:
    """Chunks were read in part; then an exact request brings them to host memory and to the device."""
    cell = sparse_cell(make_cell, admission_frequency=99)
    put_in_parts(cell, prompt(4))
    put_in_parts(cell, prompt(4, kind=2))
    for kind in (1, 2):
        answered(cell, prompt(4, kind=kind), importance=QUARTER)
    shares = storage_of(cell).sparse.shares
    assert len(shares.by_name) == 8

    answered(cell, prompt(4), max_tokens=1)

    (node, _), *_ = path_of(cell, prompt(4))
    names = list(shares.by_name)[: node.size // CHUNK]
    assert node.importance == shares.importance_of(names) != 1.0
    assert worth(cell.state, node) == hotness(cell.state, node) * node.importance


def test_a_node_that_was_there_before_is_valued_anew(make_cell: MakeCell) -> None:
    """It is on one worker's device, and another worker reads its tokens in part."""
    cell = sparse_cell(make_cell, workers=2, neighbour_loads=False, max_running=1)
    answered(cell, prompt(4), max_tokens=1)
    put_in_parts(cell, prompt(4))
    put_in_parts(cell, prompt(4, kind=2))
    answered(cell, prompt(4, kind=2), importance=QUARTER)
    (node, _), *_ = path_of(cell, prompt(4))
    assert node.importance == 1.0
    holder = next(iter(node.device))
    cell.submit(prompt(1, kind=9), max_tokens=60, ignore_eos=True)  # It is busy.

    storage = storage_of(cell)
    names = put_in_parts(cell, prompt(4))
    storage.sparse.shares.note(names, bytes([200] * 4))
    value_path(cell.state, storage, [(node, 8)], 0)

    assert holder in node.device
    assert node.importance > 1.0
    cell.drain()


def test_the_default_policy_weighs_a_token_by_it() -> None:
    """What it costs to lose one is multiplied; nothing else changes."""
    policy = ThermoclinePolicy()
    plain = Node(id=1, parent=0, label=b"123")
    plain.host = ("storage",)
    policy.host_cost = 0.5

    assert policy._cost(plain) == 0.5
    plain.set_rare(importance=3.0)
    assert policy._cost(plain) == 1.5


def test_a_cut_node_is_as_important_in_both_parts(make_cell: MakeCell) -> None:
    """Until its chunks are looked at anew."""
    cell = sparse_cell(make_cell, importance_caching=False)
    answered(cell, prompt(4), max_tokens=1)
    (node, _), *_ = path_of(cell, prompt(4))
    node.set_rare(importance=2.0)

    answered(cell, [*prompt(2)[: 2 * CHUNK], 5, 5], max_tokens=1)

    assert [found.importance for found, _ in path_of(cell, prompt(4))] == [2.0, 2.0]


def test_switched_off_nothing_is_learned_and_nothing_counts(make_cell: MakeCell) -> None:
    """Neither shares nor warming; what counted for more or less before counts as ever."""
    cell = sparse_cell(make_cell)
    answered(cell, prompt(1, kind=3), max_tokens=1)
    (node, _), *_ = path_of(cell, prompt(1, kind=3))
    node.set_rare(importance=2.0)

    cell.feed(CellConfigured(config=CellConfig(policy="lru", importance_caching=False)))
    put_in_parts(cell, prompt(4))
    for _ in range(3):
        assert answered(cell, prompt(4), importance=QUARTER).sparse is not None

    assert node.importance == 1.0
    assert not storage_of(cell).sparse.shares.by_name
    assert "warmings_started" not in cell.state.counters


def test_what_a_storage_knew_goes_with_it(make_cell: MakeCell) -> None:
    """A new incarnation begins with nothing and is told by its lists what its disk holds."""
    cell = sparse_cell(make_cell)
    put_in_parts(cell, prompt(4))
    answered(cell, prompt(4), importance=QUARTER)
    cell.lose_storage("storage")
    cell.add_storage("storage", pages=40, disk_chunks=100, keeps_sparse=True)
    assert not storage_of(cell).sparse.shares.by_name

    cell.drain()

    assert len(storage_of(cell).sparse.chunks) == 4
    cell.feed(FlushCache(call_id="call", tiers=("disk",)))
    cell.drain()
    assert not storage_of(cell).sparse.chunks
