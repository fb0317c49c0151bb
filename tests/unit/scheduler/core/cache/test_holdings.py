"""What nodes share, against plain dictionaries."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.holdings import (
    EMPTY_MAP,
    copied,
    counted_once,
    shared_count,
    shared_depth,
    shared_names,
    with_count,
    without_count,
)

NAMES = ("a", "b", "c")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=30))
def test_counts_are_those_of_a_dictionary(changes: list[tuple[str, int]]) -> None:
    """A count that is changed in one node stays in those that share it, and one of a single name is shared."""
    held, model = EMPTY_MAP, dict[str, int]()
    for name, count in changes:
        before, others = dict(held), copied(held)
        if count:
            held, model[name] = with_count(held, name, count), count
        elif name in model:
            held = without_count(held, name)
            del model[name]

        assert others == before
        assert (list(held.items()), EMPTY_MAP) == (list(model.items()), {})
        assert model or held is EMPTY_MAP
    assert shared_count({"a": 1}) is counted_once("a") is with_count({"a": 2}, "a", 1)
    assert shared_count({"a": 2}) == {"a": 2}


def test_equal_names_are_one_tuple() -> None:
    """Nodes that are in the same pools hold the same object."""
    first, second = tuple(NAMES[:2]), tuple(list(NAMES)[:2])

    assert first is not second
    assert shared_names(first) is shared_names(second)


def test_equal_depths_are_one_number() -> None:
    """Nodes that begin equally deep hold the same object."""
    first, second = int("4096"), int("4096")

    assert first is not second
    assert shared_depth(first) is shared_depth(second)
    assert shared_depth(first) == 4096
