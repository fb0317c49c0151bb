"""Admission: what is reused and what is said about it."""

from typing import Any

import pytest

from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.cache.residency import give_host
from shared.messages.base import pack_int32, unpack_int32
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, nodes_of


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_fully_cached_prompt_recomputes_its_last_token(make_cell: MakeCell, page_size: int) -> None:
    """Whole pages are reused, but never the last token, whose logits are needed."""
    cell = make_cell(page_size=page_size, pages=256 // page_size)
    prompt = list(range(32))
    for _ in range(2):
        cell.serve(prompt, max_tokens=1)

    expected = 31 // page_size * page_size
    assert cell.admitted[1].cached_tokens == cell.admitted[1].device_tokens == expected
    assert cell.workers["worker-0"].prefilled_tokens == 32 + 32 - expected


def test_tenants_never_share(make_cell: MakeCell) -> None:
    """Another salt finds nothing."""
    cell = make_cell()
    cell.serve(list(range(20)), salt="a")
    cell.serve(list(range(20)), salt="b")

    assert cell.admitted[1].cached_tokens == 0


@pytest.mark.parametrize("hints", [{"read": False}, {"prompt_logprobs": 1}])
def test_a_request_that_may_not_read_matches_nothing(make_cell: MakeCell, hints: dict[str, Any]) -> None:
    """``cache.read`` off and prompt logprobs both compute the whole prompt."""
    cell = make_cell()
    cell.serve(list(range(20)))
    cell.serve(list(range(20)), **hints)

    assert cell.admitted[1].cached_tokens == 0


def test_a_request_that_may_not_write_leaves_nothing(make_cell: MakeCell) -> None:
    """``cache.write`` off caches no page."""
    cell = make_cell()
    cell.serve(list(range(20)), write=False)

    assert cell.state.tree.nodes == {}
    assert cell.state.workers["worker-0"].pool.free == 32


def test_pages_cover_the_prompt_and_a_lease_and_no_more(make_cell: MakeCell) -> None:
    """The lease is twice the least where there is room, and ends where the longest answer does."""
    cell = make_cell(lease_tokens=8)
    cell.submit([1] * 10, max_tokens=100)
    cell.submit([2] * 10, max_tokens=3)

    assert [len(order.pages) // 4 for order in cell.admitted] == [7, 4]


def test_nobody_overtakes_a_request_that_waits_for_pages(make_cell: MakeCell) -> None:
    """A small request behind a large one waits with it."""
    cell = make_cell(pages=16)
    cell.submit([1] * 40, max_tokens=20, request_id="running")
    cell.submit([2] * 40, max_tokens=4, request_id="large")
    cell.serve([3] * 4, max_tokens=4, request_id="small")

    assert [order.request_id for order in cell.admitted][:3] == ["running", "large", "small"]


def test_a_long_cached_node_does_not_keep_out_who_shares_its_start(make_cell: MakeCell) -> None:
    """Only the matched part of a node counts as in use."""
    cell = make_cell(pages=10)
    cell.serve(list(range(36)), max_tokens=4)

    cell.serve([*range(4), *range(90, 122)], max_tokens=4)

    assert cell.admitted[1].cached_tokens == 4


def test_usage_speaks_of_the_callers_prompt(make_cell: MakeCell) -> None:
    """A preempted request that finds its own output again reports at most its prompt as cached."""
    cell = make_cell(pages=7, page_size=1, lease_tokens=1)
    cell.submit([1, 2], max_tokens=5, request_id="a", ignore_eos=True)
    cell.serve([3, 4], max_tokens=5, request_id="b", ignore_eos=True)

    again = [order for order in cell.admitted if order.attempt > 1]
    assert again
    for order in again:
        assert order.device_tokens <= order.prompt_tokens


def node_of(cell: CellModel, tokens: list[int]) -> Node:
    """The one node of these tokens."""
    (node,) = nodes_of(cell, tokens)
    return node


def copy_to_host(cell: CellModel, node: Node) -> None:
    """Let host memory hold a copy of what the only worker has."""
    storage, host = cell.state.storages["storage"], cell.storages["storage"].pool
    pages = unpack_int32(node.device_pages("worker-0"))
    assert storage.pool is not None
    give_host(cell.state, node, storage, present(storage.pool.allocate(len(pages))))
    for page, source in zip(unpack_int32(node.host_pages("storage")), pages, strict=True):
        assert host is not None
        host.memory[page] = cell.workers["worker-0"].memory[source]


def test_what_a_request_stands_on_may_be_cut_while_room_is_made_for_it(make_cell: MakeCell) -> None:
    """A backup that its admission leads to displaces a part of the host copy of its prefix: it has all pages still."""
    cell = make_cell(page_size=16, pages=41, host_pages=38, restoring="recompute")  # Nothing is held for who waits.
    prefix, leaving, dropped = [
        list(range(kind * 1000, kind * 1000 + size)) for kind, size in ((1, 320), (2, 32), (3, 288))
    ]
    for tokens in (prefix, leaving, dropped):
        cell.serve(tokens, max_tokens=1)
    for tokens in (prefix, dropped):
        copy_to_host(cell, node_of(cell, tokens))
    held = unpack_int32(node_of(cell, prefix).device_pages("worker-0"))

    cell.submit(prefix + [7] * 64, max_tokens=1, request_id="last")

    assert cell.admitted[-1].request_id == "last"
    assert len(match_prefix(cell.state.tree, namespace(), pack_int32(prefix), 20)) == 2
    assert unpack_int32(cell.admitted[-1].pages)[:20] == held
    assert len(cell.admitted[-1].pages) // 4 == 25
    cell.drain()
