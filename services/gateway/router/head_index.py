"""An index of the prompt heads that cells hold. Pure: time is an argument.

A cell's heads come from several sources: each of its gateways reports some, and the router knows what it has sent there
itself. Each source has one bit, and each digest the bits of all sources that hold it, so that finding every cell's
longest match takes one look-up per depth, however many cells there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from services.gateway.prompt_heads import Head

OWN = ""
"""The gateway's name in the source of heads that the router has sent to a cell itself."""

Source = tuple[str, str]  # Cell and gateway.


class HeadIndex:
    """Digests and the sources that hold them."""

    def __init__(self, most: int = 65_536) -> None:
        """Keep up to ``most`` digests of each source; those reported or sent longest ago go first."""
        self._most = most
        self._holders: dict[int, int] = {}  # Bits of sources by digest.
        self._held: dict[Source, dict[int, float]] = {}  # Time of each digest's report or sending, oldest first.
        self._bits: dict[Source, int] = {}
        self._masks: dict[str, int] = {}  # Bits of all of a cell's sources.

    def __len__(self) -> int:
        """Return the number of digests that any cell holds."""
        return len(self._holders)

    def count(self, cell: str) -> int:
        """Return the number of a cell's digests; one of several sources counts as often."""
        return sum(len(held) for source, held in self._held.items() if source[0] == cell)

    def add(self, source: Source, digests: Iterable[int], now_s: float) -> None:
        """Add digests that the source holds as of now."""
        held = self._held.get(source)
        if held is None:
            held = self._open(source)
        bit = self._bits[source]
        for digest in digests:
            if held.pop(digest, None) is None:
                self._holders[digest] = self._holders.get(digest, 0) | bit
            held[digest] = now_s
        while len(held) > self._most:
            self._take_from(source, next(iter(held)))

    def remove(self, source: Source, digests: Iterable[int]) -> None:
        """Remove digests that the source no longer holds; unknown ones are ignored."""
        held = self._held.get(source, {})
        for digest in digests:
            if digest in held:
                self._take_from(source, digest)

    def drop(self, source: Source) -> None:
        """Forget a source and all of its digests."""
        held = self._held.pop(source, None)
        if held is None:
            return
        bit = self._bits.pop(source)
        self._masks[source[0]] &= ~bit
        for digest in held:
            self._clear(digest, bit)

    def expire(self, source: Source, before_s: float) -> None:
        """Forget digests that the source reported, or was sent, before this time."""
        held = self._held.get(source, {})
        while held and next(iter(held.values())) < before_s:
            self._take_from(source, next(iter(held)))

    def matches(self, head: Head) -> dict[str, int]:
        """Return the bytes of the head that each cell holds from its start; cells that hold nothing are left out."""
        found: dict[str, int] = {}
        missing = dict(self._masks)
        seen = 0
        for digest, depth in zip(reversed(head.digests), reversed(head.depths), strict=True):
            holders = self._holders.get(digest, 0) & ~seen
            if holders:
                for cell in [cell for cell, mask in missing.items() if mask & holders]:
                    found[cell] = depth
                    seen |= missing.pop(cell)
                if not missing:
                    break
        return found

    def first_unknown(self, head: Head) -> int:
        """Return the shallowest digest that no source holds; the deepest if all are held, 0 for no head."""
        for digest in head.digests:
            if digest not in self._holders:
                return digest
        return head.digests[-1] if head.digests else 0

    def _open(self, source: Source) -> dict[int, float]:
        taken = 0
        for bit in self._bits.values():
            taken |= bit
        bit = next(1 << place for place in count() if not taken >> place & 1)
        self._bits[source] = bit
        self._masks[source[0]] = self._masks.get(source[0], 0) | bit
        self._held[source] = {}
        return self._held[source]

    def _take_from(self, source: Source, digest: int) -> None:
        del self._held[source][digest]
        self._clear(digest, self._bits[source])

    def _clear(self, digest: int, bit: int) -> None:
        rest = self._holders[digest] & ~bit
        if rest:
            self._holders[digest] = rest
        else:
            del self._holders[digest]
