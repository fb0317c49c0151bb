"""Narrow labels against plain lists of tokens."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.cache import labels
from services.scheduler.core.cache.labels import (
    LEAST_NARROWED,
    NARROW_BYTES,
    label_of,
    narrow,
    narrow_behind,
    tokens_of,
    widened,
)
from services.scheduler.core.cache.prefix_tree import Node, PrefixTree, add_child, root_of, split
from shared.messages.base import pack_int32, unpack_int32
from tests.stateful.cell_model import namespace

MOST = 2**24 - 1
"""The highest token that fits into a narrow label."""

NARROW = st.integers(0, MOST) | st.sampled_from([0, 1, 255, 256, 2**16 - 1, 2**16, MOST])
WIDE = st.sampled_from([MOST + 1, 2**24 + 255, 2**31 - 1, -1, -(2**24), -(2**31)])


@given(st.lists(NARROW, max_size=70))
def test_a_narrow_label_has_three_bytes_of_each_token(tokens: list[int]) -> None:
    """The low ones, in order, and nothing else; widened, they are the same tokens."""
    label = narrow(pack_int32(tokens))

    assert label == b"".join(token.to_bytes(NARROW_BYTES, "little") for token in tokens)
    assert unpack_int32(widened(label)) == tokens


@given(st.lists(NARROW, max_size=20), WIDE, st.lists(NARROW, max_size=20))
def test_a_token_that_needs_a_fourth_byte_is_not_narrowed(before: list[int], token: int, after: list[int]) -> None:
    """Wherever it stands. Negative ones need it, too."""
    assert narrow(pack_int32([*before, token, *after])) is None


@pytest.mark.parametrize("count", [1_024, 1_025])
def test_few_and_many_tokens_are_narrowed_alike(count: int) -> None:
    """From any place of a prompt on, also where another token there is wide."""
    tokens = random.Random(count).choices(range(MOST + 1), k=count + 2)
    packed = pack_int32([-1, *tokens[1:-1], 2**24])

    assert narrow_behind(packed, 0, len(packed) - 4) is None
    assert narrow_behind(packed, 4, len(packed)) is None
    narrowed = narrow_behind(packed, 4, len(packed) - 4)
    assert narrowed is not None
    assert unpack_int32(widened(bytes(narrowed[:-1]))) == tokens[1:-1]


def test_long_labels_are_told_back() -> None:
    """As long as the prompts of the largest contexts are."""
    tokens = random.Random(3).choices(range(MOST + 1), k=131_072)
    label = narrow(pack_int32(tokens))

    assert label is not None
    assert len(label) == 3 * len(tokens)
    assert unpack_int32(widened(label)) == tokens


@pytest.fixture(autouse=True, scope="module")
def short_labels_are_narrow() -> Iterator[None]:
    """From the first token on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "LEAST_NARROWED", 1)
        yield


def in_tree(tokens: list[int]) -> tuple[PrefixTree, Node]:
    """A node with these tokens, a page each."""
    tree = PrefixTree(page_size=1)
    return tree, add_child(tree, root_of(tree, namespace()), pack_int32(tokens))


@given(st.lists(NARROW | WIDE, min_size=1, max_size=30), st.integers(0, 30), st.integers(0, 40))
def test_a_node_tells_its_tokens_and_any_part_of_them(tokens: list[int], start: int, end: int) -> None:
    """Whether they are narrow or one of them is not."""
    _, node = in_tree(tokens)

    assert node.rare.is_wide == any(not 0 <= token <= MOST for token in tokens)
    assert node.size == node.end == len(tokens)
    assert unpack_int32(node.tokens) == tokens
    assert unpack_int32(node.tokens_between(start, end)) == tokens[start:end]
    assert tokens_of(node.label, start, end, is_wide=node.rare.is_wide) == pack_int32(tokens[start:end])


@given(st.lists(NARROW | WIDE, min_size=2, max_size=30), st.integers(1, 29))
def test_both_parts_of_a_cut_node_keep_their_tokens(tokens: list[int], cut: int) -> None:
    """And the form of the whole: a narrow part of a wide label stays wide."""
    cut = min(cut, len(tokens) - 1)
    tree, node = in_tree(tokens)
    is_wide = node.rare.is_wide

    upper = split(tree, node, cut)

    assert unpack_int32(upper.tokens) + unpack_int32(node.tokens) == tokens
    assert (upper.size, node.size, node.depth) == (cut, len(tokens) - cut, cut)
    assert upper.rare.is_wide == node.rare.is_wide == is_wide


@pytest.mark.parametrize("token", [MOST, MOST + 1])
def test_a_tree_without_digests_narrows_nothing(token: int) -> None:
    """Its nodes are gone soon, and are compared more often than they are kept."""
    tree = PrefixTree(page_size=1, has_digests=False)
    node = add_child(tree, root_of(tree, namespace()), pack_int32([token, 5]))

    assert node.rare.is_wide
    assert node.label == node.tokens == pack_int32([token, 5])


@pytest.mark.parametrize(("tokens", "is_wide"), [(LEAST_NARROWED - 1, True), (LEAST_NARROWED, False)])
def test_short_spans_stay_wide(monkeypatch: pytest.MonkeyPatch, tokens: int, is_wide: bool) -> None:
    """They are most of the nodes that a request meets, and a small part of the bytes."""
    monkeypatch.setattr(labels, "LEAST_NARROWED", LEAST_NARROWED)
    packed = pack_int32(range(tokens))

    assert label_of(packed) == (packed if is_wide else narrow(packed), is_wide)
