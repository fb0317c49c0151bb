"""Whose chunks are whose on a disk, and how many bytes each owner may have there.

Owners are learnt from orders: whose a namespace is, and its quota from then on. A namespace that has chunks when its
owner is first heard of is counted then, once. Of each owner there is a heap of its chunks beside that of all, so that
the least worth of one owner is found as soon as the least worth of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_NAMESPACES = 65_536
"""Namespaces whose owner is remembered while nothing of them is there."""

Entry = tuple[float, int, int, bytes]
"""(logarithm of worth per byte, -place, number, name)"""


@dataclass(slots=True)
class ChunkOwner:
    """``nbytes`` are on the disk, ``reserved`` on their way. ``quota`` 0 is no bound."""

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
    """Counts chunks by namespace, with or without an owner, and names owners."""

    def __init__(self) -> None:
        self._by_name: dict[str, ChunkOwner] = {}
        self._by_namespace: dict[str, ChunkOwner] = {}
        self._counts: dict[str, int] = {}  # Chunks there or on their way, by namespace.
        self._above: dict[str, ChunkOwner] = {}  # Who was above its quota when that was looked at last.

    def of(self, namespace: str) -> ChunkOwner | None:
        """Return the owner of a namespace; None where it is unknown."""
        return self._by_namespace.get(namespace)

    def learn(self, namespace: str, name: str, quota: int) -> tuple[ChunkOwner, bool]:
        """Assign a namespace to this owner with this quota; return also whether its chunks are to be counted as its.

        The first word on a namespace stands.
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
        """Bytes on the disk by owner: of those that have any, ``most`` at the most, who have most. Does not mutate."""
        found = {owner.name: owner.nbytes for owner in self._by_name.values() if owner.nbytes}
        if len(found) > most:
            found = dict(sorted(found.items(), key=lambda entry: -entry[1])[:most])
        return found

    def note_excess(self, owner: ChunkOwner) -> None:
        """Note an owner that may be above its quota now: something of it was found, or its quota is lower."""
        if owner.excess > 0:
            self._above[owner.name] = owner

    def above(self) -> list[ChunkOwner]:
        """Those that have more than they may, for longest first."""
        if self._above:
            self._above = {name: owner for name, owner in self._above.items() if owner.excess > 0}
        return list(self._above.values())

    def count(self, namespace: str, change: int) -> None:
        """So many chunks of a namespace are there, or on their way, more or fewer."""
        counted = self._counts.get(namespace, 0) + change
        if counted:
            self._counts[namespace] = counted
        else:
            self._counts.pop(namespace, None)

    def _forget_unused(self) -> None:
        """Forget namespaces without chunks where very many are known, and owners without namespaces."""
        if len(self._by_namespace) < MAX_NAMESPACES + len(self._counts):
            return
        self._by_namespace = {name: owner for name, owner in self._by_namespace.items() if name in self._counts}
        self._by_name = {owner.name: owner for owner in self._by_namespace.values()}
