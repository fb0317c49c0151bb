"""What nodes share, and lists of pages in one ``bytes``, against plain dictionaries and lists."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.holdings import (
    EMPTY_MAP,
    copied,
    counted_once,
    cut_lists,
    shared_count,
    shared_names,
    with_count,
    without_count,
)
from services.scheduler.core.cache.prefix_tree import Node
from shared.messages.base import pack_int32

NAMES = ("a", "b", "c")
puts = {"device": Node.put_on_device, "loading": Node.put_loading, "host": Node.put_in_host}
takes = {"device": Node.take_from_device, "loading": Node.take_loading, "host": Node.take_from_host}
reads = {"device": Node.device_pages, "loading": Node.loading_pages, "host": Node.host_pages}


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


@settings(max_examples=200)
@given(
    pages=st.integers(1, 4),
    changes=st.lists(st.tuples(st.sampled_from(list(puts)), st.sampled_from(NAMES)), max_size=20),
)
def test_pages_of_each_pool_are_those_that_were_put_there(pages: int, changes: list[tuple[str, str]]) -> None:
    """Whatever the order in which pools come and go; what is taken is what was put."""
    node, model = Node(id=2, parent=1, tokens=b""), dict[tuple[str, str], bytes]()
    for number, (tier, name) in enumerate(changes):
        if (tier, name) in model:
            assert takes[tier](node, name) == model.pop((tier, name))
        else:
            model[tier, name] = pack_int32(range(number * pages, (number + 1) * pages))
            puts[tier](node, name, model[tier, name])

        assert {(tier, name) for tier in puts for name in getattr(node, tier)} == model.keys()
        assert all(reads[tier](node, name) == held for (tier, name), held in model.items())
        assert len(node.pages) == 4 * pages * len(model)


@given(count=st.integers(0, 4), length=st.integers(1, 6), data=st.data())
def test_all_lists_are_cut_at_one_place(count: int, length: int, data: st.DataObject) -> None:
    """What is before it in each, and what is after."""
    lists = [bytes(range(at * length, (at + 1) * length)) for at in range(count)]
    cut = data.draw(st.integers(0, length))

    upper, lower = cut_lists(b"".join(lists), length, cut)

    assert (upper, lower) == (b"".join(each[:cut] for each in lists), b"".join(each[cut:] for each in lists))
