"""Which mixes a worker can execute that runs layer by layer, and the search for the fastest among them.

What can be executed. A pass computes, at each layer, a stretch of tokens that ends with the request's last one. A
token that is computed at a layer needs its own hidden state from the layer before, so it was computed there too: the
stretch begins at r(l), and r never falls from layer to layer; rows drop out of the pass, none join. Attention of the
rows needs KV of everything before r(l) at that layer: it is on the device, arrives, or is projected from hidden
states that arrive, and the pass waits for it at that layer. Nothing else is needed, so every such r is executable
and no other mix is. A row that goes no further than a layer is only projected there: nobody needs what attention would
make of it. Recomputing the first layers of everything (HCache 4.1.2) is r = 0, then the prefix's end;
recomputing a suffix is r constant. A hole that is computed between spans that are loaded is no such pass.

Which of them are looked at. With layers that are alike, a best r takes at most two values a <= b: for given prices of
links and computing, each layer by itself has the same best beginning, and mixing two of them balances the two. So a
staircase is (a, b, k): layers [0, k) begin at a, those from k on at b. (What a row's last layer saves may make a third
value better by less than a layer.) As a token costs more to compute the deeper it
is, while a copy costs the same everywhere, beginnings are looked for only where groups change (:mod:`groups`).

Tokens come first, then hidden states, KV last, by layer. Where all layers have the same copies on one link, loading
per layer therefore never falls from layer to layer and computing never rises, so whoever executes layers in order
waits for about one of them in all (Johnson's rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.planner.assignment import Assignment, assign
from bench.planner.spans import all_layers

if TYPE_CHECKING:
    from bench.planner.groups import Prefix
    from bench.planner.sources import Cell
    from services.scheduler.core.hidden.partition import LayerCosts


@dataclass(frozen=True, slots=True)
class Staircase:
    """Layers [0, ``layers``) begin at the boundary ``low``, the others at the boundary ``high``; see the module."""

    low: int
    high: int
    layers: int
    assignment: Assignment


class Search:
    """For one prefix and one choice of sources."""

    def __init__(
        self, prefix: Prefix, cells: list[Cell], costs: LayerCosts, queued: list[float], *, first_layers: bool
    ) -> None:
        self._first_layers = first_layers
        self._prefix = prefix
        self._cells = cells
        self._queued = queued
        self._layers = costs.layers
        self._every = all_layers(costs.layers)
        self._hidden_us = costs.hidden_us
        end = prefix.tokens
        self._row_us = [costs.recompute_us(prefix.starts[span], end) for span in prefix.boundaries]
        self._nothing = [0] * len(prefix.groups)

    def best(self, known: Staircase | None = None) -> Staircase:
        """The fastest, unless ``known`` is as fast."""
        last = len(self._prefix.boundaries) - 1
        best = known
        for high in range(last, -1, -1):
            if best is not None and self._least_us(high, high, 0) >= best.assignment.time_us:
                break  # Computing that much alone takes longer, and what is further left even more.
            if not self._lacking(0, high):
                best = self._better(best, high, high, 0)
            for low in range(high if self._first_layers else 0):
                best = self._best_between(best, low, high)
        if best is None:
            best = self._better(None, 0, 0, 0)
        assert best is not None
        return best

    def _best_between(self, best: Staircase | None, low: int, high: int) -> Staircase | None:
        """The best number of layers that begin at ``low`` where the others begin at ``high``."""
        if self._lacking(0, low):
            return best
        least = max(1, self._lacking(low, high).bit_length())
        most = self._layers - 1
        if least > most:
            return best
        if best is not None:
            most = min(most, self._most_layers(low, high, best.assignment.time_us))
            if most < least:
                return best
        bounds: dict[int, float] = {}

        def bound(layers: int) -> float:
            if layers not in bounds:
                bounds[layers] = self._assign(low, high, layers, whole=False).time_us
            return bounds[layers]

        left, right = least, most
        while left < right:
            middle = (left + right) // 2
            if bound(middle) <= bound(middle + 1):
                right = middle
            else:
                left = middle + 1
        # The bound is convex in the layers, so those that may be better lie around its least.
        for step, layers in ((1, left), (-1, left - 1)):
            while least <= layers <= most and (best is None or bound(layers) < best.assignment.time_us):
                best = self._better(best, low, high, layers)
                layers += step
        return best

    def _better(self, best: Staircase | None, low: int, high: int, layers: int) -> Staircase:
        found = self._assign(low, high, layers, whole=True)
        if best is not None and best.assignment.time_us <= found.time_us:
            return best
        return Staircase(low, high, layers, found)

    def _assign(self, low: int, high: int, layers: int, *, whole: bool) -> Assignment:
        loads = list(self._queued)
        loads[0] = self._least_us(low, high, layers)
        before, low_layers = self._prefix.before, all_layers(layers)
        stretches = [(self._every & ~low_layers, before[high])]
        if layers:
            stretches.append((low_layers, before[low]))
        return assign(loads, self._cells, stretches, whole=whole)

    def _least_us(self, low: int, high: int, layers: int) -> float:
        """Computing from tokens alone, and what goes before; rows that end with the last low layer are projected."""
        computing = self._queued[0] + self._layers * self._row_us[high]
        if not layers or low == high:
            return computing
        return computing + (layers - 1) * (self._row_us[low] - self._row_us[high]) + self._projected_us(low, high)

    def _projected_us(self, low: int, high: int) -> float:
        """Keys and values of a layer for the tokens between two boundaries, whose hidden states are at hand."""
        starts, boundaries = self._prefix.starts, self._prefix.boundaries
        return (starts[boundaries[high]] - starts[boundaries[low]]) * self._hidden_us

    def _most_layers(self, low: int, high: int, time_us: float) -> int:
        """Layers that can begin at ``low`` within a time."""
        each = self._row_us[low] - self._row_us[high]
        left = time_us - self._least_us(low, high, 1)
        if left < 0:
            return 0
        return 1 + int(left / each) if each > 0 else self._layers

    def _lacking(self, low: int, high: int) -> int:
        """Layers of which nothing exists for some span between two boundaries, or from the first one on."""
        found = 0
        for boundary in range(low + 1, high + 1):
            found |= self._prefix.lacking[boundary]
        return found
