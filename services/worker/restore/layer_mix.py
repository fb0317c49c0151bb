"""The means by which each layer of a prefix is restored (HCache section 4.1: hidden states are partitioned by layers).

The first layers are recomputed from tokens, because a layer's input needs all layers before it; then come those
restored from hidden states; the last ones are loaded as KV, so that the link is busy while hidden states are being
projected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.errors import InvariantViolated
from shared.messages.pools import KvGeometry

Means = Literal["recompute", "hidden", "load"]


@dataclass(frozen=True, slots=True)
class LayerMix:
    """Number of layers that each means restores, in the order of the layers."""

    recomputed: int
    from_hidden: int
    loaded: int

    def __post_init__(self) -> None:
        """Raise InvariantViolated for a negative number, and where there is no layer at all."""
        if min(self.recomputed, self.from_hidden, self.loaded) < 0 or self.layers < 1:
            raise InvariantViolated(f"no prefix is restored as {self}")

    @classmethod
    def of_hidden(cls, geometry: KvGeometry, recomputed: int) -> LayerMix:
        """Return a restoration from hidden pages with the first ``recomputed`` layers recomputed.

        Layers that the pages lack are recomputed, too. Contents of the pages for recomputed layers are ignored. Raises
        InvariantViolated for more layers than there are.
        """
        recomputed = max(recomputed, geometry.absent)
        hidden_end = max(recomputed, geometry.absent + geometry.from_hidden)
        return cls(recomputed, hidden_end - recomputed, geometry.layers - hidden_end)

    @property
    def layers(self) -> int:
        """Number of all layers."""
        return self.recomputed + self.from_hidden + self.loaded

    @property
    def hidden_layers(self) -> range:
        """Layers restored from hidden states."""
        return range(self.recomputed, self.recomputed + self.from_hidden)

    @property
    def loaded_layers(self) -> range:
        """Layers loaded as KV, the last ones."""
        return range(self.recomputed + self.from_hidden, self.layers)

    def means(self, layer: int) -> Means:
        """Return the means by which ``layer`` is restored."""
        if layer < self.recomputed:
            return "recompute"
        return "hidden" if layer in self.hidden_layers else "load"
