"""The radix tree against a dictionary from sequences of tokens to nodes, over random histories."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.core.cache import labels, prefix_match, prefix_tree
from services.scheduler.core.cache.digests import extend
from services.scheduler.core.cache.holdings import EMPTY_MAP, counted_once
from services.scheduler.core.cache.labels import child_of
from services.scheduler.core.cache.prefix_match import match_again, match_below, match_prefix
from services.scheduler.core.cache.prefix_tree import (
    Node,
    PrefixTree,
    add_child,
    ancestors,
    descendants_first,
    head_of,
    page_count,
    remove_leaf,
    root_of,
    tokens_to,
    way_to,
)
from shared.messages.base import pack_int32, unpack_int32
from tests.stateful.cell_model import namespace
from tests.unit.scheduler.core.cache.test_prefix_tree import insert


class Model:
    """Which prefixes are cached, as tuples of tokens, each with how often it was put there and is still held."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = PrefixTree(page_size=page_size)
        self.known: dict[Any, Any] = {}
        self.widths: dict[bool, None] = {}  # Of labels that there were.

    def insert(self, tokens: list[int]) -> None:
        """Put a sequence into both, and cut nodes where it leaves them."""
        insert(self.tree, namespace(), pack_int32(tokens))
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            self.known[tuple(tokens[:end])] = None

    def remove(self, choice: int) -> None:
        """Take a leaf from both."""
        leaves = [node for node in self.tree.nodes.values() if node.parent and not node.children]
        leaf = leaves[choice % len(leaves)]
        path = unpack_int32(b"".join(node.tokens for node in reversed(ancestors(self.tree, leaf))))
        first = len(path) - leaf.size + self.page_size
        for end in range(first, len(path) + 1, self.page_size):
            del self.known[tuple(path[:end])]
        remove_leaf(self.tree, leaf)

    def expected_pages(self, tokens: list[int], most: int) -> int:
        """How many pages of ``tokens`` are cached, tried one after another."""
        pages, most = 0, min(most, len(tokens) // self.page_size)
        while pages < most and tuple(tokens[: (pages + 1) * self.page_size]) in self.known:
            pages += 1
        return pages

    def check(self) -> None:
        """The nodes together hold what is known, each once and where it belongs."""
        held = 0
        for node in self.tree.nodes.values():
            if not node.parent:
                continue
            parent = self.tree.nodes[node.parent]
            assert child_of(self.tree, parent, node.tokens, 0) is node
            assert node.depth == parent.depth + parent.size
            assert node.digest == extend(parent.end_digest, head_of(self.tree, node.tokens))
            assert node.end_digest == extend(parent.end_digest, node.tokens)
            assert isinstance(node.children, int) == (len(node.child_ids) < 2)
            self.check_way(node)
            held += page_count(self.tree, node)
            self.widths[node.rare.is_wide] = None
        assert held == len(self.known)
        for root in self.tree.roots.values():
            assert descendants_first(self.tree, self.tree.nodes[root])[-1].id == root

    def check_way(self, node: Node) -> None:
        """The way to a node is what walking there finds, whatever was kept of it."""
        walked, at = [node], node
        while (at := self.tree.nodes[at.parent]).parent:
            walked.append(at)
        way = way_to(self.tree, node)
        assert [each.id for each in way.nodes] == [each.id for each in reversed(walked)]
        assert [(each.id, pages) for each, pages in way.path] == [
            (each.id, page_count(self.tree, each)) for each in reversed(walked)
        ]
        assert way.root is at
        assert tokens_to(self.tree, node) == b"".join(each.tokens for each in way.nodes)


LAST = [0, 0, 2**24 - 1, 2**24 - 1, 2**24]
"""Of three tokens, the last needs four bytes, so that labels of both widths stand beside and above one another."""


def sequence(chance: random.Random, page_size: int) -> list[int]:
    """One of few sequences, so that many share a beginning; pages differ in their last token only."""
    tokens = []
    for _ in range(chance.randrange(1, 7)):
        tokens += [7] * (page_size - 1) + [chance.choice(LAST)]
    return tokens


def a_history(page_size: int, seed: int) -> Model:
    """Insert, remove and ask at random, and compare after every action."""
    chance = random.Random(seed)
    model = Model(page_size)
    asked: dict[Any, Any] = {}
    for _ in range(120):
        tokens = sequence(chance, page_size)
        kind = chance.random()
        if kind < 0.4 or not model.known:
            model.insert(tokens)
        elif kind < 0.6:
            model.remove(chance.randrange(1000))
        else:
            packed = pack_int32(tokens) + pack_int32([9] * chance.randrange(page_size))
            most = chance.randrange(1, 8)
            path = match_prefix(model.tree, namespace(), packed, most)
            again = match_again(model.tree, namespace(), packed, most, *asked.get(packed, (0, 0)))

            pages_found = model.expected_pages(tokens, most)
            assert sum(pages for _, pages in path) == pages_found
            assert b"".join(node.tokens for node, _ in path).startswith(packed[: pages_found * page_size * 4])
            assert [(node.id, pages) for node, pages in again] == [(node.id, pages) for node, pages in path]
            for place, (node, pages) in enumerate(path):
                if pages == page_count(model.tree, node):
                    assert match_below(model.tree, node, packed, most) == path[place + 1 :]
            if path:
                node, pages = path[-1]
                asked[packed] = (node.id, node.depth + pages * page_size)
        model.check()
    return model


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("at_once", [1, 100, prefix_match.NARROWED_TOKENS])
def test_a_history_leaves_tree_and_model_equal(
    monkeypatch: pytest.MonkeyPatch, page_size: int, seed: int, at_once: int
) -> None:
    """Whatever is put in, cut and removed, a match finds what comparing every prefix finds, first or again.

    However much of a prompt is compared with narrow labels at once, and however few ways there is room for.
    """
    monkeypatch.setattr(prefix_tree, "_MOST_KEPT", 10_000 if seed < 3 else 40)
    monkeypatch.setattr(prefix_tree, "_MOST_TOKEN_BYTES", 100_000 if seed < 3 else 40 * page_size)
    monkeypatch.setattr(prefix_match, "NARROWED_TOKENS", at_once)
    monkeypatch.setattr(labels, "LEAST_NARROWED", 2 * page_size)

    model = a_history(page_size, seed)

    assert model.widths.keys() == {False, True}


@pytest.mark.parametrize("key", [lambda page: 5, lambda page: 3 + page[-4] % 2], ids=["one key", "two keys"])
def test_pages_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch, key: Callable[..., int]) -> None:
    """A collision of hashes costs a comparison and never gives a wrong node, and removals keep others findable."""
    for module in (labels, prefix_match):
        monkeypatch.setattr(module, "page_key", key)

    for seed in range(6):
        a_history(4, seed)


def test_a_match_goes_on_where_the_last_one_ended() -> None:
    """What was cached behind the end of the last match is found, and so is what was cut within it."""
    tree = PrefixTree(page_size=2)
    model = Model(2)
    model.tree = tree
    model.insert([1, 2, 3, 4])
    asked = pack_int32([1, 2, 3, 4, 5, 6, 7, 8])
    node, _ = match_prefix(tree, namespace(), asked, 4)[-1]
    model.insert([1, 2, 9, 9])
    model.insert([1, 2, 3, 4, 5, 6])

    path = match_again(tree, namespace(), asked, 4, node.id, 4)

    assert [unpack_int32(found.tokens) for found, _ in path] == [[1, 2], [3, 4], [5, 6]]


def test_a_narrow_label_is_compared_where_the_wide_one_above_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it began, though the prompt goes on there as the narrow one does."""
    monkeypatch.setattr(labels, "LEAST_NARROWED", 2)
    tree = PrefixTree(page_size=1)
    node = root_of(tree, namespace())
    for tokens in ([1, 2], [3], [3, 9]):
        node = add_child(tree, node, pack_int32(tokens))

    assert [pages for _, pages in match_prefix(tree, namespace(), pack_int32([1, 2, 3, 9, 5]), 5)] == [2, 1]
    assert [pages for _, pages in match_prefix(tree, namespace(), pack_int32([1, 2, 3, 3, 9]), 5)] == [2, 1, 2]


def test_a_match_that_ended_at_its_cap_goes_on_within_its_node() -> None:
    """A sequence that has grown since matches more of the node in which its last match ended."""
    model = Model(2)
    model.insert([1, 2, 3, 4, 5, 6, 7, 8])
    tokens = pack_int32([1, 2, 3, 4, 5, 6, 0, 0])
    ((node, pages),) = match_prefix(model.tree, namespace(), tokens[:12], 1)

    assert pages == 1
    assert match_again(model.tree, namespace(), tokens, 4, node.id, 2) == [(node, 3)]
    assert match_again(model.tree, namespace(), tokens, 4, 12345, 2) == [(node, 3)]


def test_the_shared_empty_dictionary_refuses_changes() -> None:
    """Nobody can write into what a million nodes share."""
    node = add_child(PrefixTree(page_size=1), root_of(PrefixTree(page_size=1), namespace()), pack_int32([1]))

    for change in (
        lambda: node.locks.__setitem__("w", 1),
        lambda: node.host_locks.setdefault("w", 1),
        lambda: node.below.update(w=1),
        lambda: counted_once("w").pop("w"),
    ):
        with pytest.raises(TypeError):
            change()
    assert EMPTY_MAP == {}
