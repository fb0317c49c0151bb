"""Every way to restore the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.restore.layer_mix import LayerMix


def every_mix(layers: int) -> Iterator[LayerMix]:
    """All mixes of a model of ``layers`` layers."""
    for recomputed in range(layers + 1):
        for from_hidden in range(layers - recomputed + 1):
            yield LayerMix(recomputed, from_hidden, layers - recomputed - from_hidden)
