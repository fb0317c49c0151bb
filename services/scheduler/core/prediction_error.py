"""How wrong predicted restorations were, by method: smoothed relative errors, for export as metrics."""

from __future__ import annotations

from math import inf

import msgspec

_KEPT = 0.9
"""Part of what is known that a further restoration leaves standing."""


MOST_KINDS = 64
"""Kinds that are told apart; what comes after counts as OTHER. Bounds the state and the metrics made of it."""

OTHER = "other"


class MethodError(msgspec.Struct):
    """Of one method. ``bias`` above 0: it took longer than predicted."""

    observations: int = 0
    bias: float = 0.0  # Smoothed (observed - predicted) / predicted.
    magnitude: float = 0.0  # The same without its sign.
    predicted_us: float = 0.0  # Sums over all observations.
    observed_us: float = 0.0


class PredictionErrors(msgspec.Struct):
    """By the name of what was restored how: a method and its source, or a mix of them together."""

    by_kind: dict[str, MethodError] = {}

    def note(self, kind: str, predicted_us: float, observed_us: float) -> None:
        """A restoration that was predicted to take so long took so long. What cannot be is ignored. Mutates."""
        if not 0 < predicted_us < inf or not 0 <= observed_us < inf:
            return
        error = (observed_us - predicted_us) / predicted_us
        if kind not in self.by_kind and len(self.by_kind) >= MOST_KINDS:
            kind = OTHER
        known = self.by_kind.setdefault(kind, MethodError())
        kept = _KEPT if known.observations else 0.0
        known.observations += 1
        known.predicted_us += predicted_us
        known.observed_us += observed_us
        known.bias = kept * known.bias + (1 - kept) * error
        known.magnitude = kept * known.magnitude + (1 - kept) * abs(error)


KV_FROM_DISK = "kv from disk"


IMPORTANT_FROM_DISK = "important tokens from disk"
