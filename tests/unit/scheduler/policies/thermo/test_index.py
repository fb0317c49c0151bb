"""Rows are found by their keys, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.policies.thermo.columns import Wholes
from services.scheduler.policies.thermo.index import Index


@pytest.mark.parametrize("spread", [1, 0x9E3779B97F4A7C15])
def test_finds_what_was_added_until_it_is_removed(spread: int) -> None:
    """Of keys in a row as of keys that are digests, while the buckets grow."""
    index, keys, known = Index(), Wholes("Q", [0]), dict[int, int]()
    rng = np.random.default_rng(1)
    for number in range(1, 3000):
        key = number * spread % 2**64
        keys.append(key)
        index.add(keys, number)
        known[key] = number
        if number % 3 == 0:
            gone = list(known)[int(rng.integers(len(known)))]
            index.remove(keys, known.pop(gone))

    assert index.count == len(known)
    assert all(index.find(keys, key) == known.get(key, 0) for key in keys[1:])
    assert index.find_all(keys, np.array(keys, np.uint64)).tolist() == [index.find(keys, key) for key in keys]
    assert len(index.buckets) >= index.count
    assert len(index.following) <= 3000 + 64


def test_chains_are_short() -> None:
    """Buckets are split as rows come, so that hardly any has more than a few."""
    index, keys = Index(), Wholes("Q", [0])
    for number in range(1, 5000):
        keys.append(number * 0x9E3779B97F4A7C15 % 2**64)
        index.add(keys, number)
    longest = 0
    for first in index.buckets:
        length, row = 0, first
        while row:
            length, row = length + 1, index.following[row]
        longest = max(longest, length)

    assert longest <= 12


def test_a_row_that_is_not_there_cannot_be_removed() -> None:
    """Nor can one twice."""
    index, keys = Index(), Wholes("Q", [0, 5, 6])
    index.add(keys, 1)

    with pytest.raises(KeyError):
        index.remove(keys, 2)
    index.remove(keys, 1)
    with pytest.raises(KeyError):
        index.remove(keys, 1)
