"""What a cache of several owners keeps."""

from __future__ import annotations

import pytest

from shared.fair_cache import FairCache


def test_the_owner_with_the_most_loses_its_least_recently_used() -> None:
    """However many it adds, the others keep theirs."""
    cache: FairCache[int, int] = FairCache(5)
    cache.keep("a", 0, 0)
    cache.keep("a", 1, 1)
    for key in range(10):
        cache.keep("b", key, key)
        cache.use("b", 0)

    assert len(cache) == 5
    assert [key for key in range(10) if ("b", key) in cache] == [0, 8, 9]
    assert cache.use("a", 0) == 0
    assert cache.use("a", 1) == 1


def test_of_equal_owners_the_least_recently_used_loses() -> None:
    """An owner without values is forgotten."""
    cache: FairCache[str, int] = FairCache(2)
    cache.keep("a", "k", 1)
    cache.keep("b", "k", 2)
    cache.use("a", "k")
    cache.keep("c", "k", 3)

    assert [("a", "k") in cache, ("b", "k") in cache, ("c", "k") in cache] == [True, False, True]


def test_an_owner_finds_only_its_own() -> None:
    """A value is replaced, not added."""
    cache: FairCache[str, int] = FairCache(2)
    cache.keep("a", "k", 1)
    cache.keep("a", "k", 2)

    assert len(cache) == 1
    assert cache.use("a", "k") == 2
    with pytest.raises(KeyError):
        cache.use("b", "k")


def test_values_count_by_their_weight() -> None:
    """The heaviest owner loses, and as many values as it takes; a value kept again has its new weight."""
    cache: FairCache[str, int] = FairCache(10)
    cache.keep("a", "k", 1, 3)
    for number, key in enumerate("xyz"):
        cache.keep("b", key, number, 2)
    cache.keep("b", "last", 9, 5)

    assert [("a", "k") in cache, *(("b", key) in cache for key in "xyz")] == [True, False, False, True]
    cache.keep("b", "last", 9, 1)
    cache.keep("b", "more", 9, 4)
    assert len(cache) == 4


def test_the_value_that_came_last_stays() -> None:
    """However much it weighs, and if its owner has nothing else: it is used at once."""
    cache: FairCache[str, int] = FairCache(10)
    for key in "xyz":
        cache.keep("a", key, 1, 1)
    cache.keep("b", "k", 2, 9)
    cache.keep("c", "k", 3, 11)

    assert len(cache) == 1
    assert cache.use("c", "k") == 3
