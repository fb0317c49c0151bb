"""Digests and page numbers of a node in one ``bytes``, against plain dictionaries and lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.holdings import (
    LEAST_RUN,
    digests_of,
    inserted,
    lists_of,
    run_of,
    taken,
    with_lists,
    written,
)
from services.scheduler.core.cache.prefix_tree import Node
from shared.messages.base import pack_int32

NAMES = ("a", "b", "c")
puts = {"device": Node.put_on_device, "loading": Node.put_loading, "host": Node.put_in_host}
takes = {"device": Node.take_from_device, "loading": Node.take_loading, "host": Node.take_from_host}
reads = {"device": Node.device_pages, "loading": Node.loading_pages, "host": Node.host_pages}
DIGESTS = (2**64 - 1, 7)


@settings(max_examples=300)
@given(
    pages=st.integers(1, 2 * LEAST_RUN),
    changes=st.lists(st.tuples(st.sampled_from(list(puts)), st.sampled_from(NAMES), st.booleans()), max_size=20),
)
def test_pages_of_each_pool_are_those_that_were_put_there(pages: int, changes: list[tuple[str, str, bool]]) -> None:
    """Whatever the order in which pools come and go, and whether pages follow one another; digests stay."""
    node, model = Node(id=2, parent=1, label=b"", record=written(*DIGESTS)), dict[tuple[str, str], bytes]()
    for number, (tier, name, is_run) in enumerate(changes):
        if (tier, name) in model:
            assert takes[tier](node, name) == model.pop((tier, name))
        else:
            numbers = range(number * pages, (number + 1) * pages)
            model[tier, name] = pack_int32(numbers if is_run else numbers[::-1])
            puts[tier](node, name, model[tier, name])

        assert {(tier, name) for tier in puts for name in getattr(node, tier)} == model.keys()
        assert all(reads[tier](node, name) == held for (tier, name), held in model.items())
        assert (node.digest, node.end_digest) == digests_of(node.record) == DIGESTS
        assert node.record == with_lists(node.record, lists_of(node.record, node.pools))
        assert len(node.record) <= 16 + 4 * pages * len(model)


def test_pages_that_follow_one_another_take_four_bytes_a_pool() -> None:
    """As long as it is so in all pools; a pool where they do not has all lists written out until it is gone."""
    run, other, scattered = run_of(500, 100), run_of(2**21, 100), pack_int32(range(100, 0, -1))
    record = inserted(inserted(written(*DIGESTS), 0, 0, run), 1, 1, other)

    assert len(record) == 16 + 2 * 4 + 3
    mixed = inserted(record, 2, 1, scattered)
    assert (len(mixed), lists_of(mixed, 3)) == (16 + 3 * 400, [run, scattered, other])
    assert taken(mixed, 3, 1) == record
    assert taken(taken(record, 2, 0), 1, 0) == written(*DIGESTS)


@pytest.mark.parametrize("first", [0, 1, 1000, 2**20 - 5, 2**20, 2**31 - 10])
def test_a_run_is_its_numbers(first: int) -> None:
    """In front of the end of the table, across it and behind."""
    assert run_of(first, 10) == np.arange(first, first + 10, dtype="<i4").tobytes()
