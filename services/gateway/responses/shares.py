"""Which kept responses go when their bucket is nearly full: the oldest of the caller with the most.

The broker drops the oldest of all at its bounds, so one caller could displace the responses of all others. A gateway
knows the sizes of those that it has kept since its start, and counts no others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shared.bus.protocol import KeptRoom, StreamLimits

FULL_SHARE = 7 / 8
"""Share of either bound from which on the bucket is nearly full."""

LOOK_SHARE = 1 / 64
"""Share of either bound that is written between two looks at how full the bucket is."""

MOST_ERASED = 64
"""Limit on the responses to erase after one look; if more are due, the next look follows at once."""

MOST_KNOWN = 100_000
"""Limit on the entries whose sizes are known."""


@dataclass(slots=True)
class _Owned:
    """What one caller keeps, by name, oldest first."""

    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    nbytes: int = 0


class KeptShares:
    """Sizes of the kept responses by their owners. Only a ledger: the caller talks to the broker."""

    def __init__(self) -> None:
        """Begin without any known response, and with a look due."""
        self._owners: dict[str, _Owned] = {}
        self._known = 0
        self._budget_bytes = 0.0
        self._budget_entries = 0.0

    @property
    def is_look_due(self) -> bool:
        """Whether so much was written since the last look that the bucket may be nearly full."""
        return self._budget_bytes <= 0 or self._budget_entries <= 0

    def note(self, owner: str, name: str, nbytes: int) -> None:
        """Note that a response was kept under a fresh name."""
        owned = self._owners.setdefault(owner, _Owned())
        owned.sizes[name] = nbytes
        owned.nbytes += nbytes
        self._known += 1
        self._budget_bytes -= nbytes
        self._budget_entries -= 1
        if self._known > MOST_KNOWN:
            self._pop(max(self._owners, key=lambda each: len(self._owners[each].sizes)))

    def erased(self, owner: str, name: str) -> None:
        """Note that a response was erased, if it is known."""
        owned = self._owners.get(owner)
        if owned is not None and name in owned.sizes:
            self._remove(owner, name)

    def looked(self, room: KeptRoom) -> list[str]:
        """Note how full the bucket is, and return the names to erase; they are forgotten here.

        With one known owner there is nothing to share, and the broker drops the oldest by itself.
        """
        self._budget_bytes = room.most_bytes * LOOK_SHARE
        self._budget_entries = room.most_entries * LOOK_SHARE
        excess_bytes = room.nbytes - room.most_bytes * FULL_SHARE
        excess_entries = room.entries - room.most_entries * FULL_SHARE
        names: list[str] = []
        while len(self._owners) > 1 and (excess_bytes > 0 or excess_entries > 0):
            if len(names) == MOST_ERASED:
                self._budget_bytes = 0
                break
            by_bytes = excess_bytes > 0
            largest = max(self._owners, key=lambda each: self._weight(each, by_bytes=by_bytes))
            name, nbytes = self._pop(largest)
            excess_bytes -= nbytes
            excess_entries -= 1
            names.append(name)
        return names

    def put_off(self) -> None:
        """Note that the broker did not say how full the bucket is: the next look follows after as much as usual."""
        limits = StreamLimits()
        self.looked(KeptRoom(0, limits.kept_bytes, 0, limits.kept_entries))

    def _weight(self, owner: str, *, by_bytes: bool) -> int:
        owned = self._owners[owner]
        return owned.nbytes if by_bytes else len(owned.sizes)

    def _pop(self, owner: str) -> tuple[str, int]:
        name, nbytes = next(iter(self._owners[owner].sizes.items()))
        self._remove(owner, name)
        return name, nbytes

    def _remove(self, owner: str, name: str) -> None:
        owned = self._owners[owner]
        owned.nbytes -= owned.sizes.pop(name)
        self._known -= 1
        if not owned.sizes:
            del self._owners[owner]
