"""What the planner answers: how each span gets onto the device layer by layer, and how long that should take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["device", "kv", "hidden", "tokens"]
"""Reuse what is there, copy KV, make KV from hidden states, or compute from tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Spans [first_span, end_span), which are tokens [start, end), at layers [first_layer, end_layer)."""

    method: Method
    source: str  # "" where nothing is read.
    first_span: int
    end_span: int
    start: int
    end: int
    first_layer: int
    end_layer: int

    @property
    def token_layers(self) -> int:
        return (self.end - self.start) * (self.end_layer - self.first_layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Pieces that cover every span and layer of the prefix once, and what they add up to.

    The worker computes tokens from ``row_starts[l]`` on at layer l; it never falls from one layer to the next, so one
    pass does it, from which rows drop out on the way. At the last layer of a row only its keys and values are made.
    ``cached_tokens`` is where rows begin at the end: whatever comes behind is computed as if nobody had known it,
    together with the request's own tokens. All that comes before a row and is not on the device is loaded or projected
    before attention at its layer. See :mod:`staircase`.
    """

    pieces: tuple[Piece, ...]
    row_starts: tuple[int, ...]
    cached_tokens: int
    predicted_us: float  # The busiest resource; what bubbles add says :mod:`timeline`.
    resource_us: tuple[tuple[str, float], ...]  # Computing first, then each link, queues included.
    single_us: tuple[tuple[str, float], ...]  # What one method alone would take, where one alone can do it.
    explanations: tuple[str, ...]
