"""Prefixes are remembered after their nodes have gone, the latest ones of them, in few bytes."""

from __future__ import annotations

from array import array
from collections import deque

import msgspec
import numpy as np
import pytest

from services.scheduler.policies.thermo.columns import ROWS, decoded, encoded
from services.scheduler.policies.thermo.index import Index
from services.scheduler.policies.thermo.prefixes import Prefixes

GOLDEN = 0x9E3779B97F4A7C15


def leave(prefixes: Prefixes, number: int, head: int) -> int:
    """A prefix of that number came and went."""
    row = prefixes.open(number * GOLDEN % 2**64, head, number, 16)
    prefixes.make_ghost(row)
    return row


def ghost_order(prefixes: Prefixes) -> list[int]:
    """Digests, the longest gone first."""
    found, row = [], prefixes.newer[0]
    while row:
        found.append(prefixes.digest[row])
        row = prefixes.newer[row]
    return found


@pytest.mark.parametrize("limit", [5, 50])
def test_ghosts_are_found_until_they_are_forgotten(limit: int) -> None:
    """Against a queue: by digest, and the latest one under each key by that."""
    prefixes = Prefixes(limit=limit)
    known: deque[int] = deque()
    heads: dict[int, int] = {}
    rng = np.random.default_rng(limit)
    for number in range(1, 400):
        digest, head = number * GOLDEN % 2**64, number % 90 + 1
        row = leave(prefixes, number, head)
        known.append(digest)
        heads[head] = digest
        oldest = prefixes.oldest()
        if oldest:
            assert prefixes.digest[oldest] == known.popleft()
            prefixes.forget(oldest)
        if number % 3 == 0:
            back = known[int(rng.integers(len(known)))]
            row = prefixes.find(back)
            prefixes.revive(row, 10_000 + number)
            known.remove(back)
            assert prefixes.of_node(10_000 + number) == row
            assert prefixes.by_head.find(prefixes.head, prefixes.head[row]) == 0
        assert prefixes.ghosts == len(known) <= limit
        assert ghost_order(prefixes) == list(known)
        assert all(prefixes.find(digest) for digest in known)
        for head, digest in heads.items():
            found = prefixes.by_head.find(prefixes.head, head)
            assert (prefixes.digest[found] if found else 0) == (digest if digest in known else 0)


def test_rows_are_used_again() -> None:
    """Of prefixes that were forgotten, with nothing left of them."""
    prefixes = Prefixes(limit=10)
    for number in range(1, 5000):
        row = leave(prefixes, number, number)
        prefixes.count[row], prefixes.passed[row] = 7, 2
        if prefixes.oldest():
            prefixes.forget(prefixes.oldest())

    row = prefixes.open(77, 78, 79, 80)
    assert len(prefixes.digest) <= 1 + ROWS
    assert (prefixes.count[row], prefixes.passed[row], prefixes.context[row]) == (1, 0, 0)


def test_a_prefix_costs_about_a_hundred_bytes() -> None:
    """Rows and what finds them, resident and as a ghost."""
    prefixes, count = Prefixes(), 20_000
    for number in range(1, count):
        prefixes.open(number * GOLDEN % 2**64, number, number, 16)
    columns = [getattr(prefixes, name) for name in prefixes.__struct_fields__]
    indexes = [column for column in columns if isinstance(column, Index)]
    columns += [column for index in indexes for column in (index.buckets, index.following)]
    size = sum(column.itemsize * len(column) for column in columns if isinstance(column, array))

    assert size / count < 105


def test_goes_on_from_a_snapshot() -> None:
    """Bytes that are read are written again, and another column's are refused."""
    prefixes = Prefixes(limit=100)
    for number in range(1, 150):
        leave(prefixes, number, number % 7 + 1)
    packed = msgspec.msgpack.encode(prefixes, enc_hook=encoded)

    copy = msgspec.msgpack.decode(packed, type=Prefixes, dec_hook=decoded)
    assert copy == prefixes
    assert msgspec.msgpack.encode(copy, enc_hook=encoded) == packed
    with pytest.raises(ValueError, match="not a column"):
        decoded(array, b"")
    with pytest.raises(ValueError, match="not a column"):
        decoded(array, b"x12345678")
    with pytest.raises(NotImplementedError, match="set is no column"):
        encoded(set())
