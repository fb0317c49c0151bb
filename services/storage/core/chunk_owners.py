"""The owners of chunks on a disk, and how many bytes each may have there.

Orders name the owner of a namespace and its quota from then on. A namespace that has chunks when its owner is first
named is counted then, once. Each owner has a heap of its chunks beside that of all, so that the least worth of one
owner is found as quickly as the least worth of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_NAMESPACES = 65_536
"""Namespaces whose owner is remembered while they have no chunks."""

Entry = tuple[float, int, int, bytes]
"""(logarithm of worth per byte, -place, number, name)"""


@dataclass(slots=True)
class ChunkOwner:
    """Bytes of one owner: ``nbytes`` are on the disk, ``reserved`` are arriving. ``quota`` 0 is no bound."""

    name: str
    quota: int = 0
    nbytes: int = 0
    reserved: int = 0
    chunks: int = 0
    heap: list[Entry] = field(default_factory=list)

    @property
    def excess(self) -> int:
        """Bytes above the quota, 0 or less within it."""
        return self.nbytes + self.reserved - self.quota if self.quota else 0


class ChunkOwners:
    """Counts of chunks by namespace, with or without an owner, and the owners by name."""

    def __init__(self) -> None:
        """Begin with no owners, and no chunks counted."""
        self._by_name: dict[str, ChunkOwner] = {}
        self._by_namespace: dict[str, ChunkOwner] = {}
        self._counts: dict[str, int] = {}  # Present and arriving chunks by namespace.
        self._above: dict[str, ChunkOwner] = {}  # Owners above their quotas at the last check.

    def of(self, namespace: str) -> ChunkOwner | None:
        """Return the owner of a namespace; None where it is unknown."""
        return self._by_namespace.get(namespace)

    def learn(self, namespace: str, name: str, quota: int) -> tuple[ChunkOwner, bool]:
        """Assign a namespace to this owner with this quota; return also whether its chunks are to be counted as its.

        The first assignment of a namespace stands.
        """
        owner = self._by_namespace.get(namespace)
        is_new = owner is None
        if owner is None:
            self._forget_unused()
            owner = self._by_name.setdefault(name, ChunkOwner(name))
            self._by_namespace[namespace] = owner
        if owner.name == name:
            owner.quota = max(0, quota)
        return owner, is_new and self._counts.get(namespace, 0) > 0

    def nbytes(self, most: int) -> dict[str, int]:
        """Return the bytes on the disk by owner, for the ``most`` owners that have most. Does not change the state."""
        found = {owner.name: owner.nbytes for owner in self._by_name.values() if owner.nbytes}
        if len(found) > most:
            found = dict(sorted(found.items(), key=lambda entry: -entry[1])[:most])
        return found

    def note_excess(self, owner: ChunkOwner) -> None:
        """Note an owner that may be above its quota now: a chunk of it was found, or its quota is lower."""
        if owner.excess > 0:
            self._above[owner.name] = owner

    def above(self) -> list[ChunkOwner]:
        """Return the owners above their quotas, the longest above first."""
        if self._above:
            self._above = {name: owner for name, owner in self._above.items() if owner.excess > 0}
        return list(self._above.values())

    def count(self, namespace: str, change: int) -> None:
        """Change the number of a namespace's chunks, present or arriving, by ``change``."""
        counted = self._counts.get(namespace, 0) + change
        if counted:
            self._counts[namespace] = counted
        else:
            self._counts.pop(namespace, None)

    def _forget_unused(self) -> None:
        """Forget namespaces without chunks when very many are known, and owners without namespaces."""
        if len(self._by_namespace) < MAX_NAMESPACES + len(self._counts):
            return
        self._by_namespace = {name: owner for name, owner in self._by_namespace.items() if name in self._counts}
        self._by_name = {owner.name: owner for owner in self._by_namespace.values()}
