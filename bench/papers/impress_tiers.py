"""The three tiers of IMPRESS: a cache on the device, one in host memory, and a disk that holds everything (4.4.2).

The caches are exclusive, and what a policy values least leaves: the device for host memory, host memory for nothing,
because the disk has a copy. An object that was asked for is on the device afterwards if it is worth more than what
would leave for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["lru", "lfu", "score"]
Place = Literal["device", "host", "disk"]

KEPT_OF_AVERAGE = 0.9
"""Of an object's importance, when it is asked for again (the paper's moving average; it gives no weight)."""


@dataclass(slots=True)
class _Object:
    nbytes: float
    place: Place = "disk"
    uses: int = 0
    importance: float = 1.0
    value: float = 0.0


@dataclass
class Cache:
    """One tier: what it holds, and a heap from which stale lines are dropped when they come up."""

    capacity: float
    used: float = 0.0
    heap: list[tuple[float, int, Hashable]] = field(default_factory=list)


class Tiers:
    """``ask`` for objects in the order of requests; capacities in bytes."""

    def __init__(self, policy: Policy, device_bytes: float, host_bytes: float) -> None:
        self._policy = policy
        self._caches = {"device": Cache(device_bytes), "host": Cache(host_bytes)}
        self._objects: dict[Hashable, _Object] = {}
        self._clock = 0

    def ask(self, key: Hashable, nbytes: float, importance: float) -> Place:
        """Where it was; ``importance`` is the share of it that is important to this request."""
        self._clock += 1
        one = self._objects.setdefault(key, _Object(nbytes))
        found = one.place
        one.uses += 1
        is_first = one.uses == 1
        one.importance = importance if is_first else _average(one.importance, importance)
        one.value = self._value(one)
        if found != "device":
            self._leave(one)
            if not self._enter("device", key, one):
                self._enter("host", key, one)
        else:
            heapq.heappush(self._caches["device"].heap, (one.value, self._clock, key))
        return found

    def _value(self, one: _Object) -> float:
        if self._policy == "lru":
            return float(self._clock)
        return one.uses * (one.importance if self._policy == "score" else 1.0)

    def _leave(self, one: _Object) -> None:
        if one.place != "disk":
            self._caches[one.place].used -= one.nbytes
            one.place = "disk"

    def _enter(self, place: Place, key: Hashable, one: _Object) -> bool:
        """Make room for it among what is worth less; False where there is no such room."""
        cache = self._caches[place]
        out: list[tuple[Hashable, _Object]] = []
        room = cache.capacity - cache.used
        while room < one.nbytes:
            least = self._least(place)
            if least is None or least[1].value >= one.value:
                for other_key, other in out:
                    heapq.heappush(cache.heap, (other.value, self._clock, other_key))
                return False
            heapq.heappop(cache.heap)
            out.append(least)
            room += least[1].nbytes
        for other_key, other in out:
            self._leave(other)
            if place == "device":
                self._enter("host", other_key, other)
        cache.used += one.nbytes
        one.place = place
        heapq.heappush(cache.heap, (one.value, self._clock, key))
        return True

    def _least(self, place: Place) -> tuple[Hashable, _Object] | None:
        """What is worth least there, still at the head of the heap."""
        heap = self._caches[place].heap
        while heap:
            value, _, key = heap[0]
            one = self._objects[key]
            if one.place == place and one.value == value:
                return key, one
            heapq.heappop(heap)
        return None


def _average(old: float, new: float) -> float:
    return KEPT_OF_AVERAGE * old + (1 - KEPT_OF_AVERAGE) * new
