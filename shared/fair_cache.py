"""A bounded cache that several owners fill, none of them at the cost of the others."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class _Owned(Generic[K, V]):
    """What one owner keeps, least recently used first: values with their weights."""

    values: OrderedDict[K, tuple[V, int]] = field(default_factory=OrderedDict)
    weight: int = 0


class FairCache(Generic[K, V]):
    """Values by owner and key; an owner finds only its own. Beyond the bound, the owner with the most loses its oldest.

    Oldest is least recently used.
    """

    def __init__(self, most: int) -> None:
        """Keep values that weigh at most ``most`` together, of all owners, or one value that weighs more."""
        self._most = most
        self._owners: OrderedDict[str, _Owned[K, V]] = OrderedDict()  # Least recently used first.
        self._weight = 0

    def __len__(self) -> int:
        """Return the number of values of all owners."""
        return sum(len(owned.values) for owned in self._owners.values())

    def __contains__(self, place: tuple[str, K]) -> bool:
        """Return whether an owner has a value under a key."""
        owner, key = place
        return owner in self._owners and key in self._owners[owner].values

    def use(self, owner: str, key: K) -> V:
        """Return the owner's value, now its most recently used. Raises KeyError where there is none."""
        owned = self._owners[owner]
        owned.values.move_to_end(key)
        self._owners.move_to_end(owner)
        return owned.values[key][0]

    def keep(self, owner: str, key: K, value: V, weight: int = 1) -> None:
        """Keep a value as the owner's most recently used, and drop others beyond the bound."""
        owned = self._owners.setdefault(owner, _Owned())
        _, before = owned.values.get(key, (None, 0))
        owned.values[key] = (value, weight)
        owned.values.move_to_end(key)
        owned.weight += weight - before
        self._weight += weight - before
        self._owners.move_to_end(owner)
        while self._weight > self._most and len(self) > 1:
            spared = owner if len(owned.values) == 1 else None  # It is the value that came last.
            others = (each for each in self._owners if each != spared)
            self._drop(max(others, key=lambda each: self._owners[each].weight))  # Of several, the first.

    def _drop(self, owner: str) -> None:
        owned = self._owners[owner]
        _, (_, weight) = owned.values.popitem(last=False)
        owned.weight -= weight
        self._weight -= weight
        if not owned.values:
            del self._owners[owner]
