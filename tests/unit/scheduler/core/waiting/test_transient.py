"""The tree of transient nodes."""

import random
from collections.abc import Sequence

import pytest

from services.scheduler.core.cache.prefix_tree import PrefixTree
from services.scheduler.core.waiting import transient
from services.scheduler.core.waiting.transient import TransientTree
from shared.messages.base import pack_int32
from tests.stateful.cell_model import namespace

PAGE = 4
NAME = namespace()


def mark(tree: TransientTree, request_id: str, tokens: Sequence[int], worker_id: str = "w") -> int:
    """Mark these tokens for a producer; returns its deepest node."""
    return transient.add_span(tree, PAGE, worker_id, request_id, NAME, pack_int32(tokens))


def marked(tree: TransientTree, tokens: Sequence[int], worker_id: str = "w") -> list[list[str]]:
    """Producers of each whole page of ``tokens`` that is marked."""
    path = transient.match(tree, NAME, pack_int32(tokens), len(tokens) // PAGE)
    return [tree.marks[node.id].get(worker_id, []) for node, pages in path for _ in range(pages)]


def test_only_whole_pages_are_marked() -> None:
    """What cannot be cached cannot be waited for."""
    tree = TransientTree()
    mark(tree, "a", range(10))

    assert marked(tree, range(12)) == [["a"], ["a"]]


def test_shared_spans_carry_all_their_producers() -> None:
    """A node is cut where two producers part, and both parts keep the marks."""
    tree = TransientTree()
    mark(tree, "a", [*range(8), 1, 1, 1, 1])
    mark(tree, "b", [*range(8), 2, 2, 2, 2])
    mark(tree, "c", range(4))

    assert marked(tree, [*range(8), 2, 2, 2, 2]) == [["a", "b", "c"], ["a", "b"], ["b"]]


def test_marks_are_kept_by_worker() -> None:
    """KV on one device helps nobody on another."""
    tree = TransientTree()
    mark(tree, "a", range(8), "one")
    mark(tree, "b", range(8), "two")

    assert marked(tree, range(8), "one") == [["a"], ["a"]]
    assert marked(tree, range(8), "three") == [[], []]


@pytest.mark.parametrize("seed", range(20))
def test_whoever_leaves_takes_his_marks_and_no_others(seed: int) -> None:
    """Against a dictionary of producers; an empty tree is as good as new."""
    chance = random.Random(seed)
    tree = TransientTree()
    model: dict[str, tuple[str, list[int], int]] = {}
    for number in range(60):
        if model and chance.random() < 0.45:
            name = chance.choice(sorted(model))
            worker_id, _, node = model.pop(name)
            transient.remove_span(tree, worker_id, name, node)
        else:
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 6)) for _ in range(PAGE)]
            worker_id = chance.choice("wx")
            model[f"r{number}"] = (worker_id, tokens, mark(tree, f"r{number}", tokens, worker_id))
        for _, tokens, _ in model.values():
            for index, names in enumerate(marked(tree, tokens, "w")):
                span = tokens[: (index + 1) * PAGE]
                assert sorted(names) == sorted(
                    name for name, (at, own, _) in model.items() if at == "w" and own[: len(span)] == span
                )
    for name, (worker_id, _, node) in model.items():
        transient.remove_span(tree, worker_id, name, node)
    assert tree.marks == {}
    assert tree.tree == PrefixTree(page_size=PAGE, next_id=tree.tree.next_id, has_digests=False)
