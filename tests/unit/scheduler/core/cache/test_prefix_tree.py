"""The radix tree against a naive model."""

import pytest

from services.scheduler.core.cache.labels import child_of
from services.scheduler.core.cache.prefix_match import common_pages, match_prefix
from services.scheduler.core.cache.prefix_tree import (
    Node,
    PrefixTree,
    add_child,
    ancestors,
    namespace_of,
    page_count,
    remove_leaf,
    root_of,
    split,
)
from shared.messages.base import pack_int32
from tests.stateful.cell_model import namespace


def insert(tree: PrefixTree, name: str, tokens: bytes) -> Node:
    """Put whole pages of ``tokens`` into the tree, splitting where needed."""
    page = tree.page_token_bytes
    end = len(tokens) // page * page
    node, offset = root_of(tree, name), 0
    while offset < end:
        child = child_of(tree, node, tokens, offset)
        if child is None:
            return add_child(tree, node, tokens[offset:end])
        pages = common_pages(tree, child, tokens, offset, end)
        if pages < page_count(tree, child):
            child = split(tree, child, pages)
        node, offset = child, offset + pages * page
    return node


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_match_is_whole_pages_and_capped(page_size: int) -> None:
    """Only whole pages match, and never more than the caller allows."""
    tree = PrefixTree(page_size=page_size)
    tokens = pack_int32(range(5 * page_size))
    insert(tree, namespace(), tokens)

    assert match_prefix(tree, namespace(), tokens, 5)[-1][1] == 5
    assert match_prefix(tree, namespace(), tokens, 3)[-1][1] == 3
    assert match_prefix(tree, namespace(), tokens[:-4], 5)[-1][1] == 4
    assert match_prefix(tree, namespace("other"), tokens, 5) == []


def test_a_split_keeps_what_both_parts_hold() -> None:
    """Pages, locks, readers and identities are divided or inherited, and the lower part keeps its id."""
    tree = PrefixTree(page_size=2)
    node = insert(tree, namespace(), pack_int32(range(8)))
    node.put_on_device("w", pack_int32([3, 4, 5, 6]))
    node.put_in_host("s", pack_int32([9, 8, 7, 6]))
    node.locks = {"w": 2}
    node.set_rare(host_locks={"s": 1}, identities=bytes(range(64)))
    node.transfer, node.backup_pages = 5, pack_int32([1, 2, 3, 4])

    upper = split(tree, node, 1)

    assert (upper.device_pages("w"), node.device_pages("w")) == (pack_int32([3]), pack_int32([4, 5, 6]))
    assert (upper.host_pages("s"), node.host_pages("s")) == (pack_int32([9]), pack_int32([8, 7, 6]))
    assert upper.locks == node.locks == {"w": 2}
    assert upper.host_locks == node.host_locks == {"s": 1}
    assert upper.below == {"w": 1}
    assert (upper.identities, node.identities) == (bytes(range(16)), bytes(range(16, 64)))
    assert (upper.transfer, upper.backup_pages, node.backup_pages) == (5, pack_int32([1]), pack_int32([2, 3, 4]))
    assert ancestors(tree, node) == [node, upper]
    assert namespace_of(tree, node) == namespace()


def test_common_pages_end_where_the_caller_says() -> None:
    """A node that would match further is compared up to the given end, and a shorter one up to its own."""
    tree = PrefixTree(page_size=2)
    node = insert(tree, namespace(), pack_int32(range(8)))
    tokens = pack_int32([9, 9, *range(10)])

    assert common_pages(tree, node, tokens, 8, 16) == 1
    assert common_pages(tree, node, tokens, 8, 48) == 4
    assert common_pages(tree, node, pack_int32([0, 1, 2, 9, 4, 5, 6, 7]), 0, 32) == 1


def test_the_last_leaf_takes_its_root_along() -> None:
    """A namespace without pages leaves nothing behind."""
    tree = PrefixTree(page_size=2)
    node = insert(tree, namespace(), pack_int32(range(4)))

    assert remove_leaf(tree, node) is None
    assert tree.nodes == {}
    assert tree.roots == {}
