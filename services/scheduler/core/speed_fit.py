"""Speeds learned from reports: a worker's computing and loading as a fit, everything else as a rate.

All of them are plain numbers and forget exponentially.

The time of a prefill step is taken as ``a * tokens + b * tokens * context``: a part that every token costs, and
attention, which grows with the context before it. Both are the least squares solution over the reports so far, an
older report counting less. Where the reports do not tell the two apart, or attention would make a step faster by
them, all time is attributed to tokens.

The errors of predicted restorations are learned, too, by method, for export as metrics.
"""

from __future__ import annotations

from math import inf

import msgspec

_MEMORY = 0.95
"""Weight that past reports keep at each further one: about the last twenty count."""

_CONTEXT_UNIT = 1024.0
"""Unit of contexts in tokens, which keeps both features of like size."""

_LEAST_VARIETY = 1e-3
"""1 - r² of the two features, below which they cannot be told apart."""

_RATE_MEMORY = 0.9
"""Weight that past observations of a rate keep at each further one."""

_MOST_SURPRISE = 8.0
"""A report further off the expected time than this factor (a pause of the machine) counts as this far off."""

_EXPECTING = 3
"""Reports before anything is expected."""


class Rate(msgspec.Struct):
    """A rate learned from observations, forgetting exponentially: bytes of a link, or tokens of a projection.

    HCache profiles a platform once, offline (4.1.2). A disk that wears or a link that others use changes, and a plan
    made for its past speed is late; so every finished transfer is an observation. The sums of amounts and of times
    decay with each observation that is added, so a long transfer counts for more than a short one and the last ten for
    most.
    """

    observations: int = 0
    amount: float = 0.0
    elapsed_us: float = 0.0

    def note(self, amount: float, elapsed_us: float) -> None:
        """Add an observation: ``amount`` took ``elapsed_us``. Values that are not positive and finite are ignored."""
        if not 0 < amount < inf or not 0 < elapsed_us < inf:
            return
        if self.observations >= _EXPECTING:
            expected = amount * self.elapsed_us / self.amount
            elapsed_us = min(max(elapsed_us, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)
        self.observations += 1
        self.amount = self.amount * _RATE_MEMORY + amount
        self.elapsed_us = self.elapsed_us * _RATE_MEMORY + elapsed_us

    def per_us(self, unmeasured: float) -> float:
        """Return the amount per microsecond, or ``unmeasured`` before the first observation. Changes nothing."""
        return self.amount / self.elapsed_us if self.observations else unmeasured


class SpeedFit(msgspec.Struct):
    """Weighted sums of one worker's reports. Times are in microseconds, contexts in units of 1,024 tokens."""

    reports: int = 0
    tokens_tokens: float = 0.0
    tokens_context: float = 0.0
    context_context: float = 0.0
    tokens_us: float = 0.0
    context_us: float = 0.0
    flat: float = 0.0  # Microseconds of a token, by these sums; 0 before the first report.
    slope: float = 0.0  # Microseconds of a token more per unit of context before it.
    loads: int = 0
    loaded_tokens: float = 0.0
    load_us: float = 0.0

    def note_compute(self, tokens: int, token_context: int, elapsed_us: int) -> None:
        """Note a step that computed ``tokens``, with ``token_context`` the sum over them of the context before each."""
        if tokens <= 0 or elapsed_us <= 0 or token_context < 0:
            return
        x, y = float(tokens), token_context / _CONTEXT_UNIT
        time = float(elapsed_us)
        if self.reports >= _EXPECTING:
            time = _clip(time, self.flat * x + self.slope * y)
        self.reports += 1
        self.tokens_tokens = self.tokens_tokens * _MEMORY + x * x
        self.tokens_context = self.tokens_context * _MEMORY + x * y
        self.context_context = self.context_context * _MEMORY + y * y
        self.tokens_us = self.tokens_us * _MEMORY + x * time
        self.context_us = self.context_us * _MEMORY + y * time
        self.flat, self.slope = self._solve()

    def note_load(self, tokens: int, elapsed_us: int) -> None:
        """Note a batch that loaded ``tokens`` in ``elapsed_us``."""
        if tokens <= 0 or elapsed_us <= 0:
            return
        time = float(elapsed_us)
        if self.loads >= _EXPECTING:
            time = _clip(time, tokens * self.load_us / self.loaded_tokens)
        self.loads += 1
        self.loaded_tokens = self.loaded_tokens * _MEMORY + tokens
        self.load_us = self.load_us * _MEMORY + time

    def compute_us(self, depth: int, tokens: int) -> float:
        """Return the microseconds to compute ``tokens`` after ``depth`` others; 0 before the first report."""
        return tokens * (self.flat + self.slope * (depth + tokens / 2) / _CONTEXT_UNIT)

    def token_and_pair_us(self) -> tuple[float, float]:
        """Return the microseconds of a token without context, and what each token of context adds.

        (0, 0) before the first report.
        """
        return self.flat, self.slope / _CONTEXT_UNIT

    def _solve(self) -> tuple[float, float]:
        """Return the least squares solution of the sums, both parts at least 0."""
        flat_only = self.tokens_us / self.tokens_tokens
        product = self.tokens_tokens * self.context_context
        determinant = product - self.tokens_context * self.tokens_context
        if determinant <= _LEAST_VARIETY * product:
            return flat_only, 0.0
        flat = (self.tokens_us * self.context_context - self.context_us * self.tokens_context) / determinant
        slope = (self.context_us * self.tokens_tokens - self.tokens_us * self.tokens_context) / determinant
        if flat <= 0.0 or slope <= 0.0:
            return flat_only, 0.0
        return flat, slope

    def restoration_costs(self) -> tuple[float, float]:
        """Return (context in tokens that doubles a token's flat time, cost of a loaded over a computed token).

        (0, 1), the neutral values, where nothing was measured; no load counts as dearer than computing. Pure.
        """
        if not self.reports or self.flat <= 0:
            return 0.0, 1.0
        depth = self.flat / self.slope * _CONTEXT_UNIT if self.slope > 0 else 0.0
        host = self.load_us / self.loaded_tokens / self.flat if self.loads and self.loaded_tokens > 0 else 1.0
        return depth, min(1.0, host)


def _clip(time: float, expected: float) -> float:
    return min(max(time, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)


_KEPT = 0.9
"""Weight that past restorations keep at each further one."""


MOST_KINDS = 64
"""Kinds that are told apart at most; later ones count as OTHER. Bounds the state and its metrics."""

OTHER = "other"


class MethodError(msgspec.Struct):
    """Prediction error of one method. ``bias`` above 0: it took longer than predicted."""

    observations: int = 0
    bias: float = 0.0  # Smoothed (observed - predicted) / predicted.
    magnitude: float = 0.0  # The same without its sign.
    predicted_us: float = 0.0  # Sums over all observations.
    observed_us: float = 0.0


class PredictionErrors(msgspec.Struct):
    """Errors by kind: a method and its source, or a mix of several."""

    by_kind: dict[str, MethodError] = {}

    def note(self, kind: str, predicted_us: float, observed_us: float) -> None:
        """Note the observed time of a restoration with its prediction. Impossible values are ignored."""
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
