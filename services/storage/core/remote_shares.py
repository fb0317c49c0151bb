"""Bytes of each owner in an object store, as far as one node knows, and whether there is room for more.

Nodes write into one store, and others delete there, so a node knows only a count of some minutes ago and its own
uploads since. A namespace is counted when a chunk of its owner is to be uploaded, and again when the count is old, a
few namespaces with each chunk: an owner may have very many, and each count lists objects of the store.
Nothing is ever evicted: a store does not order its objects by worth, and operators have rules of their own. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

RECOUNT_S = 600.0
"""Age of a count past which a namespace is counted again, before more of it is uploaded."""

RECOUNTED_AT_ONCE = 16
"""Most namespaces that are counted again before one chunk is uploaded; those counted longest ago come first."""

MAX_NAMESPACES = 65_536


@dataclass(slots=True)
class _Namespace:
    owner: str
    nbytes: int = 0
    since: int = 0  # The part of them reserved since the running count began.


@dataclass(slots=True)
class _Owner:
    quota: int = 0
    nbytes: int = 0  # Of all its namespaces.
    uncounted: dict[str, None] = field(default_factory=dict)
    counted: OrderedDict[str, float] = field(default_factory=OrderedDict)  # When the last count began, oldest first.


class RemoteShares:
    """Bytes and quotas by owner. Times are seconds of one clock."""

    def __init__(self, *, recount_s: float = RECOUNT_S) -> None:
        """Begin with no owners; a count is outdated once it is ``recount_s`` seconds old."""
        self._recount_s = recount_s
        self._namespaces: dict[str, _Namespace] = {}
        self._owners: dict[str, _Owner] = {}

    def knows(self, namespace: str) -> bool:
        """Return whether the owner of a namespace is known."""
        return namespace in self._namespaces

    def bounded(self) -> dict[str, tuple[str, int]]:
        """Return owner and quota of each namespace whose owner has a quota."""
        return {
            name: (known.owner, quota)
            for name, known in self._namespaces.items()
            if (quota := self._owners[known.owner].quota)
        }

    def learn(self, namespace: str, owner: str, quota: int) -> bool:
        """Assign a namespace to this owner, who may have ``quota`` bytes from now on; 0 is no bound.

        The first assignment stands. Return True if that changes :meth:`bounded`.
        """
        known, quota = self._namespaces.get(namespace), max(0, quota)
        before = self._owners[owner].quota if owner in self._owners else 0
        if known is None:
            if len(self._namespaces) >= MAX_NAMESPACES:
                self._forget(next(iter(self._namespaces)))
            self._namespaces[namespace] = _Namespace(owner)
            self._owners.setdefault(owner, _Owner()).uncounted[namespace] = None
        elif known.owner != owner:
            return False
        self._owners[owner].quota = quota
        return quota != before or (known is None and quota > 0)

    def uncounted(self, namespace: str, now_s: float) -> list[str]:
        """Return the namespaces that must be counted before a chunk of this one is uploaded."""
        known = self._namespaces.get(namespace)
        if known is None or not self._owners[known.owner].quota:
            return []
        owner = self._owners[known.owner]
        oldest = islice(owner.counted.items(), RECOUNTED_AT_ONCE)
        return [*owner.uncounted, *(name for name, begun_s in oldest if now_s - begun_s >= self._recount_s)]

    def counting(self, namespace: str) -> None:
        """Begin a count of a namespace."""
        if (known := self._namespaces.get(namespace)) is not None:
            known.since = 0

    def counted(self, namespace: str, nbytes: int, begun_s: float) -> None:
        """End a count that found so many bytes; uploads during the count may be among them or not."""
        if (known := self._namespaces.get(namespace)) is not None:
            owner = self._owners[known.owner]
            owner.nbytes += nbytes + known.since - known.nbytes
            known.nbytes = nbytes + known.since
            owner.uncounted.pop(namespace, None)
            owner.counted[namespace] = begun_s
            owner.counted.move_to_end(namespace)

    def reserve(self, namespace: str, nbytes: int) -> bool:
        """Make room for a chunk; return False if it would bring its owner above the quota."""
        known = self._namespaces.get(namespace)
        if known is None:
            return True
        owner = self._owners[known.owner]
        if owner.quota and owner.nbytes + nbytes > owner.quota:
            return False
        owner.nbytes += nbytes
        known.nbytes += nbytes
        known.since += nbytes
        return True

    def give_back(self, namespace: str, nbytes: int) -> None:
        """Release a reservation: its upload failed, or the object was there already."""
        if (known := self._namespaces.get(namespace)) is not None:
            self._owners[known.owner].nbytes -= min(nbytes, known.nbytes)
            known.nbytes = max(0, known.nbytes - nbytes)
            known.since = max(0, known.since - nbytes)

    def deleted(self, namespace: str) -> None:
        """Void the counts of a namespace ("" is all), whose chunks are being deleted."""
        for name in [namespace] if namespace else self._namespaces:
            if (known := self._namespaces.get(name)) is not None:
                owner = self._owners[known.owner]
                owner.counted.pop(name, None)
                owner.uncounted[name] = None

    def _forget(self, namespace: str) -> None:
        known = self._namespaces.pop(namespace)
        owner = self._owners[known.owner]
        owner.nbytes -= known.nbytes
        owner.uncounted.pop(namespace, None)
        owner.counted.pop(namespace, None)
        if not owner.uncounted and not owner.counted:
            del self._owners[known.owner]
