"""Quotas on a disk: an owner's chunks make room for its own, and what is above a quota goes first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.core import chunk_owners
from services.storage.core.chunk_index import Arrival, ChunkIndex
from services.storage.core.chunk_owners import ChunkOwners

GEOMETRY = b"g" * 8
OWNERS = {"a1": "a", "a2": "a", "b1": "b", "n1": ""}


def _key(namespace: str, number: int) -> ChunkKey:
    return ChunkKey(namespace, GEOMETRY, namespace.encode() + number.to_bytes(14, "big"))


def _save(
    index: ChunkIndex, namespace: str, number: int, *, value: float = 0.0, now_s: float = 0.0
) -> list[str] | None:
    """Reserve and add ten bytes; the namespaces of the victims, None if there was no room."""
    room = index.reserve(Arrival(_key(namespace, number), 10, 0, None, value), now_s)
    if not room.is_granted:
        return None
    index.add(_key(namespace, number), now_s)
    return [key.namespace for key in room.victims]


def test_an_owner_within_its_quota_loses_nothing_to_one_that_is_above() -> None:
    """The full disk's coldest chunk is another's, and stays; the owner's own coldest goes."""
    index = ChunkIndex(40)
    index.own("a1", "a", 20)
    index.own("b1", "b", 20)
    for now_s, (namespace, number) in enumerate([("b1", 1), ("b1", 2), ("a1", 3), ("a1", 4)]):
        _save(index, namespace, number, now_s=now_s)

    assert _save(index, "a1", 5, now_s=9.0) == ["a1"]
    assert _key("a1", 3) not in index
    assert _save(index, "b1", 6, now_s=10.0) == ["b1"]


def test_room_within_a_quota_is_made_though_the_disk_has_some() -> None:
    """A quota is a bound, over all namespaces of its owner; without one there is none."""
    index = ChunkIndex(1_000)
    index.own("a1", "a", 20)
    index.own("a2", "a", 20)

    assert [_save(index, "a1", 1), _save(index, "a2", 2), _save(index, "a2", 3, now_s=1.0)] == [[], [], ["a1"]]
    assert [_save(index, "n1", number) for number in range(5)] == [[]] * 5


def test_bytes_are_told_by_owner() -> None:
    """Of those with most, and all the rest together."""
    index = ChunkIndex(1_000)
    index.own("a1", "a", 0)
    index.own("b1", "b", 0)
    for number, namespace in enumerate(("a1", "a1", "a1", "b1", "b1", "n1")):
        _save(index, namespace, number)

    assert index.owned_bytes(5) == {"": 10, "a": 30, "b": 20}
    assert index.owned_bytes(1) == {"": 30, "a": 30}
    index.own("a2", "a", 20)
    assert index.owned_bytes(5) == {"": 10, "a": 20, "b": 20}


def test_what_is_worth_less_than_all_that_its_owner_has_is_not_kept() -> None:
    """As on a disk that is full."""
    index = ChunkIndex(1_000)
    index.own("a1", "a", 20)
    _save(index, "a1", 1, value=1e6)
    _save(index, "a1", 2, value=1e6)

    assert _save(index, "a1", 3) is None
    index.own("a1", "a", 9)
    assert _save(index, "a1", 3) is None


def test_what_a_start_found_counts_once_its_owner_is_known() -> None:
    """What is above goes then; what has no owner yet counts against nobody."""
    index = ChunkIndex(1_000)
    for number in range(4):
        index.found(ChunkEntry(_key("a1", number), 10), 0.0)
        index.found(ChunkEntry(_key("a2", 10 + number), 10), 0.0)
    index.hold(_key("a1", 0))

    assert [key.namespace for key in index.own("a1", "a", 25)] == ["a1", "a1"]
    assert len(index.own("a2", "a", 25)) == 4
    assert index.nbytes == 20
    assert len(index.own("a2", "a", 5)) == 1
    assert _key("a1", 0) in index  # Somebody reads it.


def test_what_is_above_a_quota_goes_before_what_is_colder() -> None:
    """It could not go when its quota was lowered, because it was pinned."""
    index = ChunkIndex(40)
    index.own("a1", "a", 30)
    for number in (1, 2, 3):
        index.pin(_key("a1", number).identity, GEOMETRY)
        _save(index, "a1", number, value=1e9, now_s=1e6)
    _save(index, "n1", 4)
    assert index.own("a1", "a", 15) == ()
    for number in (1, 2, 3):
        index.unpin(_key("a1", number).identity, GEOMETRY)

    assert _save(index, "n1", 5, now_s=1.0) == ["a1"]
    assert _save(index, "n1", 6, now_s=2.0) == ["a1"]
    assert _save(index, "n1", 7, now_s=3.0) == ["n1"]  # From there on worth decides.


def test_the_first_word_on_a_namespace_stands() -> None:
    """It has one salt. A quota that is lifted bounds nothing any more."""
    index = ChunkIndex(1_000)
    index.own("a1", "a", 20)
    index.own("a1", "b", 5)

    assert [_save(index, "a1", number) for number in (1, 2)] == [[], []]
    index.own("a1", "a", 0)
    assert _save(index, "a1", 3) == []


def test_namespaces_without_chunks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many callers make; those with chunks stay with their owners."""
    monkeypatch.setattr(chunk_owners, "MAX_NAMESPACES", 10)
    owners = ChunkOwners()
    kept, _ = owners.learn("kept", "owner", 7)
    owners.count("kept", 1)
    for number in range(100):
        owners.learn(f"namespace-{number}", f"owner-{number}", 7)

    assert owners.of("kept") is kept
    assert len(owners._by_namespace) <= 12
    assert len(owners._by_name) <= 12


class OwnersMachine(RuleBasedStateMachine):
    """Anything in any order: counts are true, and nobody within a quota pays for somebody above one."""

    numbers = st.integers(1, 30)
    namespaces = st.sampled_from(list(OWNERS))

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(100)
        self.now_s = 0.0
        self.arriving: list[tuple[ChunkKey, int]] = []
        self.quotas: dict[str, int] = {}
        self.known: dict[str, str] = {}
        self.held: set[ChunkKey] = set()

    def there(self) -> list[ChunkKey]:
        return self.index.keys()

    def used(self, owner: str) -> int:
        there = sum(self.index.nbytes_of(key) for key in self.there() if self.known.get(key.namespace) == owner)
        return there + sum(nbytes for key, nbytes in self.arriving if self.known.get(key.namespace) == owner)

    def excess(self, owner: str) -> int:
        return self.used(owner) - self.quotas[owner] if self.quotas.get(owner) else 0

    @initialize(entries=st.lists(st.tuples(namespaces, numbers, st.integers(1, 30)), max_size=8))
    def find(self, entries: list[tuple[str, int, int]]) -> None:
        for namespace, number, nbytes in entries:
            self.index.found(ChunkEntry(_key(namespace, number), nbytes), 0.0)

    @rule(namespace=namespaces, quota=st.sampled_from([0, 20, 40, 60]))
    def own(self, namespace: str, quota: int) -> None:
        owner = OWNERS[namespace]
        if not owner:
            return
        self.known[namespace], self.quotas[owner] = owner, quota
        for key in self.index.own(namespace, owner, quota):
            assert self.known.get(key.namespace) == owner
        if self.excess(owner) > 0:
            there = [key for key in self.there() if self.known.get(key.namespace) == owner]
            assert all(key in self.held for key in there)

    @rule(namespace=namespaces, number=numbers, nbytes=st.integers(1, 30), value=st.sampled_from([0.0, 1.0, 50.0]))
    def reserve(self, namespace: str, number: int, nbytes: int, value: float) -> None:
        key = _key(namespace, number)
        if key in self.index or self.index.is_arriving(key):
            return
        self.now_s += 100.0
        owner = self.known.get(namespace)
        above = {name for name in self.quotas if self.excess(name) > 0 and name != owner}
        able = {key for key in self.there() if self.known.get(key.namespace) in above and key not in self.held}
        before = self.index.nbytes + self.index.reserved
        room = self.index.reserve(Arrival(key, nbytes, 0, None, value), self.now_s)
        if room.is_granted:
            self.arriving.append((key, nbytes))
            assert owner is None or self.excess(owner) <= 0
        others = [gone for gone in room.victims if owner is None or self.known.get(gone.namespace) != owner]
        if owner is not None and self.excess(owner) + (0 if room.is_granted else nbytes) > 0 and self.quotas[owner]:
            assert not others, "somebody above its quota made others go"
        if any(self.known.get(gone.namespace) not in above for gone in others):
            left = [key for key in able if key in self.index and self.excess(self.known[key.namespace]) > 0]
            assert not left, "what is above a quota stayed"
        if others:
            assert before + nbytes > 100

    @rule(is_added=st.booleans())
    def arrive(self, is_added: bool) -> None:
        if self.arriving:
            key, _ = self.arriving.pop(0)
            if is_added:
                self.index.add(key, self.now_s)
            else:
                self.index.give_up(key)

    @rule(namespace=namespaces, number=numbers)
    def hold(self, namespace: str, number: int) -> None:
        key = _key(namespace, number)
        if key not in self.held and self.index.hold(key):
            self.held.add(key)

    @rule(namespace=namespaces, number=numbers, is_forgotten=st.booleans())
    def release(self, namespace: str, number: int, is_forgotten: bool) -> None:
        key = _key(namespace, number)
        if is_forgotten:
            self.index.forget(key)
            self.held.discard(key)
        elif key in self.held:
            self.index.release(key)
            self.held.discard(key)

    @rule(namespace=namespaces, number=numbers)
    def touch(self, namespace: str, number: int) -> None:
        self.now_s += 100.0
        self.index.touch([_key(namespace, number)], 0, None, self.now_s)

    @rule(most=st.integers(0, 120))
    def shrink(self, most: int) -> None:
        self.index.shrink(most)

    @invariant()
    def counts_are_true(self) -> None:
        for namespace, name in self.known.items():
            owner = self.index._owners.of(namespace)
            assert owner is not None
            assert owner.nbytes + owner.reserved == self.used(name)
            assert len(owner.heap) <= 2 * owner.chunks + 64 + 1


TestOwnersMachine = OwnersMachine.TestCase
TestOwnersMachine.settings = settings(max_examples=60, stateful_step_count=60)
