"""The TTFT of one request, layer by layer: what is read before and after a layer knows what it wants (IMPRESS 4.3).

There is one way from the disk over host memory to the device, used by one read at a time. Keys to choose by can be read
for the layers to come while nothing is wanted at once, because they depend on no query; what was chosen cannot, because
it is known only in its layer. With speculation the next layer's share is guessed and read while this layer computes
(HyperInfer IV-C). A layer computes when its reads are done, and ends before the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerReads:
    """Seconds of the way that a layer's reads take: before its choice, and after it."""

    ahead_s: float
    chosen_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """``ttft_s``, and how much of it nothing was computed."""

    ttft_s: float
    waited_s: float


class _Way:
    """From the disk to the device: in order of asking, but reads ahead only while nothing else is wanted."""

    def __init__(self, ahead: Sequence[float]) -> None:
        self._ahead = ahead
        self._free = 0.0
        self._ends: list[float] = []

    def idle_until(self, now: float) -> None:
        """Read ahead until then; a read that has begun goes on."""
        while len(self._ends) < len(self._ahead) and self._free < now:
            self._next()

    def ahead_of(self, layer: int) -> float:
        """When what is read ahead for it is there."""
        while len(self._ends) <= layer:
            self._next()
        return self._ends[layer]

    def read(self, now: float, seconds: float) -> float:
        """A read that is wanted now; when it ends."""
        self.idle_until(now)
        if seconds:
            self._free = max(self._free, now) + seconds
            return self._free
        return now

    def _next(self) -> None:
        self._free += self._ahead[len(self._ends)]
        self._ends.append(self._free)


def timeline(reads: Sequence[LayerReads], compute_s: float, choose_s: float, recall: float | None = None) -> Finished:
    """One request. ``compute_s`` and ``choose_s`` are of a layer; nothing is read or chosen but what ``reads`` says.

    ``recall`` is the share of what a layer wants that the layer before guesses; as much again as it misses is read in
    vain, because a guess is as large as what is wanted. None does not guess.
    """
    way = _Way([each.ahead_s for each in reads])
    now = waited = 0.0
    guessed: float | None = None  # When the guess for this layer is there.
    for index, each in enumerate(reads):
        begun = now
        now = max(now, way.ahead_of(index)) + choose_s
        if guessed is None:
            now = way.read(now, each.chosen_s)
        else:
            now = max(guessed, way.read(now, each.chosen_s * (1 - (recall or 0.0))))
        waited += now - begun
        if recall is not None and index + 1 < len(reads):
            guessed = way.read(now, reads[index + 1].chosen_s)
        now += compute_s
    return Finished(now, waited)
