"""The hash of a text's beginning up to several places, continued from an earlier text with the same beginning.

A long conversation comes again with a little more at its end. Comparing it with the earlier text takes a tenth of the
time of hashing it again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field

from services.gateway.known_texts.alike import Entry, TextsAlike

STEP_CHARACTERS = 65_536
"""Characters between two kept states of the hash."""

STATE_BYTES = 600
TOLD_BYTES = 200
"""Approximate memory of a state and of a digest."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """Hashes of one text: the ``states`` after its first ``marks`` characters, and digests by their positions."""

    marks: list[int] = field(default_factory=list)
    states: list[hashlib.blake2b] = field(default_factory=list)
    told: dict[int, bytes] = field(default_factory=dict)


HashedTexts = TextsAlike[Hashed]


class FrontHash:
    """The hash of one text up to growing positions."""

    def __init__(self, begun: hashlib.blake2b, text: str, namespace: str, texts: HashedTexts | None) -> None:
        """Hash ``text`` from the state ``begun`` on, which is changed here.

        ``texts`` are recent texts to continue from; those of one ``namespace`` must begin with the same state. With
        None the whole text is hashed.
        """
        self._digest, self._taken = begun, 0
        self._text, self._namespace, self._texts = text, namespace, texts
        found = texts.nearest(namespace, text) if texts is not None else None
        self._entry: Entry[Hashed] | None = None
        self._made = Hashed()
        self._known_to = 0
        if found is not None:
            self._entry, agreed = found
            known = self._entry.value
            count = bisect_right(known.marks, agreed)
            told = {place: digest for place, digest in known.told.items() if place <= agreed}
            self._made = Hashed(known.marks[:count], known.states[:count], told)
            self._known_to = known.marks[count - 1] if count else 0

    def digest_at(self, place: int) -> bytes:
        """Return the digest of the first ``place`` characters. Positions must not decrease."""
        told = self._made.told.get(place)
        if told is None:
            self._go_to(place)
            told = self._made.told[place] = self._digest.copy().digest()
        return told

    def keep(self) -> None:
        """Keep this text's hashes for later texts, if enough of it is new."""
        texts, made = self._texts, self._made
        if texts is None or not made.marks or made.marks[-1] == self._known_to:
            return
        before = self._entry
        goes_on = before is not None and self._text.startswith(before.text[: max(before.value.told, default=0)])
        nbytes = STATE_BYTES * len(made.marks) + TOLD_BYTES * len(made.told)
        texts.put(self._namespace, self._text, made, nbytes, before if goes_on else None)

    def _go_to(self, place: int) -> None:
        made = self._made
        count = bisect_right(made.marks, place)
        if count and made.marks[count - 1] > self._taken:
            self._digest, self._taken = made.states[count - 1].copy(), made.marks[count - 1]
        while (mark := self._taken - self._taken % STEP_CHARACTERS + STEP_CHARACTERS) <= place:
            self._take(mark)
            if not made.marks or mark > made.marks[-1]:
                made.marks.append(mark)
                made.states.append(self._digest.copy())
        self._take(place)

    def _take(self, end: int) -> None:
        # A lone surrogate can come from a template, though not from JSON.
        self._digest.update(self._text[self._taken : end].encode("utf-8", "surrogatepass"))
        self._taken = end
