"""What the fold tells the hotness filter, through whole requests."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cell_events import CellConfig, CellConfigured
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, nodes_of

SHARED = list(range(100, 132))  # 32 tokens: eight pages of four, two heads.


def ask(cell: CellModel, tokens: list[int], **fields: Any) -> None:
    """Submit a request and let the cell come to rest. One token is generated, whose KV is never computed."""
    cell.serve(tokens, max_tokens=1, ignore_eos=True, **fields)


def frequencies(cell: CellModel, tokens: list[int], salt: str = "") -> list[tuple[int, int]]:
    """(tokens of the node, frequency) along the path."""
    return [(len(node.tokens) // 4, cell.state.hotness.lookup(node.digest)[0]) for node in nodes_of(cell, tokens, salt)]


def push_out(cell: CellModel, tokens: list[int]) -> None:
    """Ask other things until nothing of ``tokens`` is in the tree any more."""
    number = 1000
    while nodes_of(cell, tokens):
        ask(cell, list(range(number, number + 48)))
        number += 48


def tail(number: int, length: int = 8) -> list[int]:
    return [2000 + 16 * number + place for place in range(length)]


def test_computed_kv_is_known_once_and_each_reuse_counts(make_cell: MakeCell) -> None:
    """Frequency is 1 after the first request and one more after each that reuses the prefix."""
    cell = make_cell(pages=64)
    ask(cell, SHARED)
    assert frequencies(cell, SHARED) == [(32, 1)]

    for number in range(3):
        ask(cell, SHARED + tail(number))
    assert frequencies(cell, SHARED) == [(32, 4)]
    assert [frequencies(cell, SHARED + tail(number))[1] for number in range(3)] == [(8, 1)] * 3


def test_both_parts_of_a_split_have_the_whole_nodes_frequency(make_cell: MakeCell) -> None:
    """And a later visit of the upper part alone raises the upper part alone."""
    cell = make_cell(pages=64)
    ask(cell, SHARED)
    for number in range(2):
        ask(cell, SHARED + tail(number))
    assert frequencies(cell, SHARED) == [(32, 3)]

    ask(cell, SHARED[:20] + tail(5))
    assert frequencies(cell, SHARED) == [(20, 4), (12, 3)]
    ask(cell, SHARED[:20] + tail(6))
    assert frequencies(cell, SHARED) == [(20, 5), (12, 3)]
    ask(cell, SHARED + tail(7))
    assert frequencies(cell, SHARED) == [(20, 6), (12, 4)]


def test_the_parts_of_a_split_have_the_whole_nodes_clock(make_cell: MakeCell) -> None:
    """A cut is no use: only what the cutting request reuses has its clock wound up."""
    cell = make_cell(pages=64, aging_requests=1)
    ask(cell, SHARED)
    for number in range(3):
        ask(cell, tail(number, 20))
    ask(cell, SHARED[:20] + tail(5))
    upper, lower = nodes_of(cell, SHARED)

    assert cell.state.hotness.lookup(upper.digest) == (2, 255)
    assert cell.state.hotness.lookup(lower.digest) == (1, 251)


def test_a_cut_within_the_head_keeps_what_is_known(make_cell: MakeCell) -> None:
    """Where a part is shorter than the head that a node is remembered by, it still has the whole's frequency."""
    cell = make_cell(pages=64)
    ask(cell, SHARED)
    ask(cell, SHARED + tail(0))
    ask(cell, SHARED[:8] + tail(1))

    assert frequencies(cell, SHARED) == [(8, 3), (24, 2)]


@pytest.mark.parametrize(
    "back", [SHARED, SHARED + tail(9, 16), SHARED[:24]], ids=["alone", "with a longer tail", "with a shorter tail"]
)
def test_a_prefix_that_comes_back_is_still_known(make_cell: MakeCell, back: list[int]) -> None:
    """Its frequency goes on from before the eviction, in whatever span it comes back."""
    cell = make_cell(pages=24)
    for _ in range(4):
        ask(cell, SHARED + tail(1))
    before = frequencies(cell, SHARED)[0][1]
    assert before == 4
    push_out(cell, SHARED)

    ask(cell, back)
    assert frequencies(cell, back) == [(len(back), before + 1)]


def test_a_few_common_tokens_make_no_old_acquaintance(make_cell: MakeCell) -> None:
    """With small pages too: what begins like an evicted prefix and goes on differently is new."""
    cell = make_cell(pages=24)
    for number in range(3):
        ask(cell, SHARED + tail(number))
    push_out(cell, SHARED)

    other = SHARED[:12] + tail(9, 20)
    ask(cell, other)
    assert frequencies(cell, other) == [(32, 1)]


def test_a_new_tail_does_not_inherit_the_history_of_its_head(make_cell: MakeCell) -> None:
    """Cut off from a prefix that came back, it has its own uses only; a tail that was known has its old ones too."""
    cell = make_cell(pages=24)
    for end in ([], tail(1, 16), tail(1, 16) + tail(4), tail(1, 16) + tail(5)):
        ask(cell, SHARED + end)
    known = dict(frequencies(cell, SHARED + tail(1, 16)))
    assert known == {32: 4, 16: 3}
    push_out(cell, SHARED)

    ask(cell, SHARED + tail(2, 16))
    ask(cell, SHARED + tail(3, 4))
    assert frequencies(cell, SHARED + tail(2, 16)) == [(32, known[32] + 2), (16, 1)]
    push_out(cell, SHARED)
    ask(cell, SHARED + tail(1, 16))
    ask(cell, SHARED + tail(3, 4))
    assert frequencies(cell, SHARED + tail(1, 16)) == [(32, known[32] + 4), (16, known[16] + 1)]


def test_clocks_go_down_with_admissions(make_cell: MakeCell) -> None:
    """By one after every ``aging_requests`` admissions, whatever those asked for; a reuse winds one up again."""
    cell = make_cell(pages=64, aging_requests=2)
    ask(cell, SHARED)
    for number in range(5):
        ask(cell, tail(number, 20))
    (node,) = nodes_of(cell, SHARED)

    assert cell.state.admissions == 6
    assert cell.state.hotness.ages == 3
    assert cell.state.hotness.lookup(node.digest) == (1, 252)
    ask(cell, SHARED + tail(7))
    assert cell.state.hotness.lookup(node.digest) == (2, 255)


def test_namespaces_are_strangers(make_cell: MakeCell) -> None:
    """The same tokens of another tenant are another prefix."""
    cell = make_cell(pages=64)
    for _ in range(3):
        ask(cell, SHARED + tail(0), salt="one")
    ask(cell, SHARED, salt="two")

    assert frequencies(cell, SHARED, "one")[0] == (36, 3)
    assert frequencies(cell, SHARED, "two") == [(32, 1)]


def test_computing_again_what_was_cached_meanwhile_is_a_use(make_cell: MakeCell) -> None:
    """Two requests that prefill the same prompt side by side have both used it."""
    cell = make_cell(pages=64, defer_tokens=0)
    cell.submit(SHARED, max_tokens=1, ignore_eos=True, request_id="first")
    cell.serve(SHARED, max_tokens=1, ignore_eos=True, request_id="second")

    (node,) = nodes_of(cell, SHARED)
    assert cell.workers["worker-0"].prefilled_tokens == 64
    assert cell.state.hotness.lookup(node.digest)[0] == 2
    ask(cell, SHARED[:20] + tail(0))
    assert frequencies(cell, SHARED) == [(20, 3), (12, 2)]


def test_depth_is_the_nodes_level(make_cell: MakeCell) -> None:
    """1 below the root, one more for each node above."""
    cell = make_cell(pages=64)
    ask(cell, SHARED)
    ask(cell, SHARED + tail(0, 12))
    ask(cell, SHARED + tail(0, 12) + tail(1))

    depths = [cell.state.hotness.depth_of(node.digest) for node in nodes_of(cell, SHARED + tail(0, 12) + tail(1))]
    assert depths == [1, 2, 3]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=40), st.sampled_from([1, 4])
)
def test_no_cached_node_is_less_hot_than_it_was_used(choices: list[tuple[int, int, int]], page_size: int) -> None:
    """Whatever is split, evicted and brought back: each node's frequency is at least its uses since it was computed."""
    cell = CellModel(CellConfig(reserve_fraction=0.0, fingerprint_bits=32), page_size=page_size)
    cell.add_worker("worker-0", pages=120 // page_size)
    for document, cut, question in choices:
        tokens = [document * 50 + place for place in range(12 + 9 * cut)] + [500 + question] * 5
        ask(cell, tokens)
        for node in cell.state.tree.nodes.values():
            if node.parent:
                assert cell.state.hotness.lookup(node.digest)[0] >= 1 + node.hits


def test_changed_widths_keep_what_cached_nodes_have(make_cell: MakeCell) -> None:
    """Frequencies stay as far as they fit, and the agings since the last use do."""
    cell = make_cell(pages=64, aging_requests=1)
    for _ in range(5):
        ask(cell, SHARED)
    ask(cell, tail(0, 20))
    (node, *_) = nodes_of(cell, SHARED)
    assert cell.state.hotness.lookup(node.digest) == (5, 254)

    cell.feed(CellConfigured(config=CellConfig(fingerprint_bits=12, clock_bits=4, frequency_bits=16)))
    assert cell.state.hotness.lookup(node.digest) == (5, 14)
    assert cell.state.hotness.fingerprint_bits == 12
    cell.feed(CellConfigured(config=CellConfig(fingerprint_bits=12, clock_bits=4, frequency_bits=2)))
    assert cell.state.hotness.lookup(node.digest) == (3, 14)
