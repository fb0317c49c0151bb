"""Runs of chunks that are still to be saved."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import split_node
from services.scheduler.core.state import Storage
from services.scheduler.core.tiers.save_runs import ChunkRun, depth_in_chunks, end_in_chunks, runs_to_save
from services.scheduler.core.tiers.under_way import DiskTier
from shared.chunks import chunk_names
from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32, unpack_int32
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell

TOKENS = list(range(400))
NAMES = chunk_names(chain_pages(chain_root(namespace()), pack_int32(TOKENS), 64), 4)


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A sequence of 25 pages on the device, cut after 6 and after 9 of them: chunks are of four."""
    cell = make_cell(page_size=16, pages=40)
    cell.serve(TOKENS, max_tokens=1)
    state = cell.state
    (node,) = path_of(cell, nodes=True)
    split_node(state, node, 6)
    split_node(state, node, 3)
    return cell


def path_of(cell: CellModel, *, nodes: bool = False) -> Any:
    """The path of the sequence."""
    path = match_prefix(cell.state.tree, namespace(), pack_int32(TOKENS), 100)
    return [node for node, _ in path] if nodes else path


def runs(
    cell: CellModel,
    *,
    first: int = 0,
    known: Sequence[bytes] = (),
    most: int = 100,
    worker_id: str = "worker-0",
    path: list[tuple[Node, int]] | None = None,
) -> list[ChunkRun]:
    """Runs of the sequence."""
    storage = Storage("storage", "one", "node", 0, disk=DiskTier(chunks=dict.fromkeys(known)))
    return runs_to_save(cell.state, path or path_of(cell), storage, worker_id, first, most)


def test_a_path_is_one_run_however_it_is_cut(cell: CellModel) -> None:
    """Chunks lie on a grid of their own."""
    (run,) = runs(cell)

    assert run.names == tuple(NAMES)
    assert len(NAMES) == 6
    assert (run.first, run.depth, unpack_int32(run.tokens)) == (0, 0, TOKENS[:384])
    assert run.reads is run.node is path_of(cell, nodes=True)[-1]


def test_known_chunks_part_the_runs(cell: CellModel) -> None:
    """Each run begins with its own depth and parent, and reads no deeper than it goes."""
    upper, lower = runs(cell, known=NAMES[1:3])

    assert (upper.first, upper.names, upper.parent) == (0, (NAMES[0],), chain_root(namespace()))
    assert (lower.first, lower.depth, lower.names, lower.parent) == (3, 192, tuple(NAMES[3:]), NAMES[2])
    assert upper.reads is path_of(cell, nodes=True)[0]


def test_a_run_is_no_longer_than_it_may_be(cell: CellModel) -> None:
    """A long one is cut into several."""
    found = runs(cell, most=4)

    assert [run.names for run in found] == [tuple(NAMES[:4]), tuple(NAMES[4:])]
    assert found[1].parent == NAMES[3]


@pytest.mark.parametrize("first", range(7))
def test_what_lies_above_the_first_chunk_is_left_out(cell: CellModel, first: int) -> None:
    """Wherever a path is taken up again, the run that is left is the same as in the whole."""
    found = runs(cell, first=first)

    assert [name for run in found for name in run.names] == NAMES[first:]
    for run in found:
        assert (run.first, run.depth) == (first, first * 64)
        assert run.parent == (NAMES[first - 1] if first else chain_root(namespace()))
        assert unpack_int32(run.tokens) == TOKENS[first * 64 : 384]


def test_a_chunk_with_a_page_that_is_nowhere_is_left_out(cell: CellModel) -> None:
    """Chunks above and below it are saved all the same."""
    state = cell.state
    middle = path_of(cell, nodes=True)[1]
    middle.put_on_device("another", middle.take_from_device("worker-0"))

    upper, lower = runs(cell)

    middle.put_on_device("worker-0", middle.take_from_device("another"))
    assert (upper.names, lower.names) == ((NAMES[0],), tuple(NAMES[3:]))
    assert [depth_in_chunks(state, node) for node in path_of(cell, nodes=True)] == [0, 1, 2]
    assert [end_in_chunks(state, node) for node in path_of(cell, nodes=True)] == [1, 2, 6]


def test_a_path_of_less_than_a_chunk_has_no_run(cell: CellModel) -> None:
    """There is nothing to name."""
    assert runs(cell, path=[(path_of(cell, nodes=True)[0], 3)]) == []
    assert runs(cell, worker_id="nobody") == []
