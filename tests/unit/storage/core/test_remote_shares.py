"""What owners have in an object store is counted, and bounded by their quotas."""

from __future__ import annotations

import pytest

from services.storage.core import remote_shares
from services.storage.core.remote_shares import RECOUNT_S, RemoteShares


def counted(shares: RemoteShares, namespace: str, nbytes: int, now_s: float = 0.0) -> None:
    shares.counting(namespace)
    shares.counted(namespace, nbytes, now_s)


def test_an_owner_has_room_up_to_its_quota() -> None:
    """Of all its namespaces together; what nobody owns, and what has no bound, always has room."""
    shares = RemoteShares()
    shares.learn("a", "acme", 100)
    shares.learn("b", "acme", 100)
    shares.learn("c", "other", 0)
    for namespace in "abc":
        counted(shares, namespace, 30)

    assert shares.reserve("a", 40)
    assert not shares.reserve("b", 1)
    assert shares.reserve("c", 10**12)
    assert shares.reserve("nobody's", 10**12)
    shares.learn("b", "acme", 101)
    assert shares.reserve("b", 1)


def test_what_did_not_get_there_leaves_its_room() -> None:
    """An upload that failed, or that found its chunk there already, takes nothing."""
    shares = RemoteShares()
    shares.learn("a", "acme", 10)
    counted(shares, "a", 0)
    assert shares.reserve("a", 10)
    assert not shares.reserve("a", 1)

    shares.give_back("a", 10)

    assert shares.reserve("a", 10)


def test_namespaces_of_an_owner_with_a_quota_are_counted_first_and_again_later() -> None:
    """Others may have written or deleted meanwhile."""
    shares = RemoteShares()
    shares.learn("a", "acme", 100)
    shares.learn("b", "acme", 100)
    shares.learn("c", "other", 0)
    assert shares.uncounted("a", 0.0) == ["a", "b"]
    assert shares.uncounted("c", 0.0) == []
    assert shares.uncounted("nobody's", 0.0) == []

    counted(shares, "a", 1, 0.0)
    counted(shares, "b", 1, 5.0)

    assert shares.uncounted("b", RECOUNT_S - 0.1) == []
    assert shares.uncounted("b", RECOUNT_S) == ["a"]
    shares.deleted("b")
    assert shares.uncounted("a", 6.0) == ["b"]
    shares.deleted("")
    assert shares.uncounted("a", 6.0) == ["b", "a"]


def test_an_owner_of_many_namespaces_has_them_counted_again_a_few_at_a_time() -> None:
    """Those that were counted longest ago first: no upload waits for a listing of all of them."""
    shares, most = RemoteShares(), remote_shares.RECOUNTED_AT_ONCE
    names = [f"n{number}" for number in range(3 * most)]
    for name in names:
        shares.learn(name, "acme", 100)
    assert shares.uncounted("n0", 0.0) == names
    for name in names:
        counted(shares, name, 1)

    due = shares.uncounted("n0", RECOUNT_S)
    for name in due:
        counted(shares, name, 2, RECOUNT_S)

    assert due == names[:most]
    assert shares.uncounted("n0", RECOUNT_S) == names[most : 2 * most]
    assert not shares.reserve("n0", 100 - 4 * most + 1)
    assert shares.reserve("n0", 100 - 4 * most)


def test_what_is_uploaded_while_a_count_runs_is_not_forgotten() -> None:
    """The listing may have passed its place already."""
    shares = RemoteShares()
    shares.learn("a", "acme", 100)
    counted(shares, "a", 0)
    assert shares.reserve("a", 50)
    shares.counting("a")
    assert shares.reserve("a", 20)
    shares.counted("a", 50, 700.0)

    assert not shares.reserve("a", 31)
    assert shares.reserve("a", 30)


def test_the_first_word_on_whose_a_namespace_is_stands() -> None:
    """Nobody else's quota can be put on it."""
    shares = RemoteShares()
    shares.learn("a", "acme", 10)
    shares.learn("a", "thief", 10**9)
    counted(shares, "a", 0)

    assert not shares.reserve("a", 11)


def test_namespaces_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was heard of first goes first, and with the last of its namespaces an owner."""
    monkeypatch.setattr(remote_shares, "MAX_NAMESPACES", 2)
    shares = RemoteShares()
    shares.learn("a", "acme", 10)
    for name in ("b", "c"):
        shares.learn(name, "other", 10)

    assert shares.uncounted("a", 0.0) == []
    assert shares.uncounted("c", 0.0) == ["b", "c"]
    assert shares.reserve("a", 11)
