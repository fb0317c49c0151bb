"""How fast a worker computes and loads, fitted to what it reports: plain numbers, forgetting exponentially.

The time of a prefill step is taken as ``a * tokens + b * tokens * context``: a part that every token costs, and
attention, which grows with the context before it. Both are the least squares solution over the reports so far, an
older report counting less. Where the reports do not tell the two apart, or say that attention makes a step
faster, all time is put down to tokens.
"""

from __future__ import annotations

import msgspec

_MEMORY = 0.95
"""Weight of the reports so far when another comes: about the last twenty count."""

_CONTEXT_UNIT = 1024.0
"""Contexts are in units of this many tokens, which keeps both features of like size."""

_LEAST_VARIETY = 1e-3
"""1 - r² of the two features, below which they cannot be told apart."""

_MOST_SURPRISE = 8.0
"""A report so many times off what was expected (a pause of the machine) is counted as this far off."""

_EXPECTING = 3
"""Reports before anything is expected."""


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


def note_compute(fit: SpeedFit, tokens: int, token_context: int, elapsed_us: int) -> None:
    """A step computed ``tokens``, with ``token_context`` the sum over them of the context before each."""
    if tokens <= 0 or elapsed_us <= 0 or token_context < 0:
        return
    x, y = float(tokens), token_context / _CONTEXT_UNIT
    time = float(elapsed_us)
    if fit.reports >= _EXPECTING:
        time = _clip(time, fit.flat * x + fit.slope * y)
    fit.reports += 1
    fit.tokens_tokens = fit.tokens_tokens * _MEMORY + x * x
    fit.tokens_context = fit.tokens_context * _MEMORY + x * y
    fit.context_context = fit.context_context * _MEMORY + y * y
    fit.tokens_us = fit.tokens_us * _MEMORY + x * time
    fit.context_us = fit.context_us * _MEMORY + y * time
    fit.flat, fit.slope = _solve(fit)


def note_load(fit: SpeedFit, tokens: int, elapsed_us: int) -> None:
    """A batch loaded ``tokens`` in this time."""
    if tokens <= 0 or elapsed_us <= 0:
        return
    time = float(elapsed_us)
    if fit.loads >= _EXPECTING:
        time = _clip(time, tokens * fit.load_us / fit.loaded_tokens)
    fit.loads += 1
    fit.loaded_tokens = fit.loaded_tokens * _MEMORY + tokens
    fit.load_us = fit.load_us * _MEMORY + time


def compute_us(fit: SpeedFit, depth: int, tokens: int) -> float:
    """Time to compute ``tokens`` after ``depth`` others; 0 before the first report."""
    return tokens * (fit.flat + fit.slope * (depth + tokens / 2) / _CONTEXT_UNIT)


def token_and_pair_us(fit: SpeedFit) -> tuple[float, float]:
    """Time of a token without context, and what each token of context adds to it: (0, 0) before the first report."""
    return fit.flat, fit.slope / _CONTEXT_UNIT


def _solve(fit: SpeedFit) -> tuple[float, float]:
    """The least squares solution of the sums, both parts at least 0."""
    flat_only = fit.tokens_us / fit.tokens_tokens
    product = fit.tokens_tokens * fit.context_context
    determinant = product - fit.tokens_context * fit.tokens_context
    if determinant <= _LEAST_VARIETY * product:
        return flat_only, 0.0
    flat = (fit.tokens_us * fit.context_context - fit.context_us * fit.tokens_context) / determinant
    slope = (fit.context_us * fit.tokens_tokens - fit.tokens_us * fit.tokens_context) / determinant
    if flat <= 0.0 or slope <= 0.0:
        return flat_only, 0.0
    return flat, slope


def _clip(time: float, expected: float) -> float:
    return min(max(time, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)


def restoration_costs(fit: SpeedFit) -> tuple[float, float]:
    """(context in tokens at which computing a token takes twice its flat time, a loaded token over a computed one).

    (0, 1), the neutral values, where nothing was measured; no load counts as dearer than computing. Pure.
    """
    if not fit.reports or fit.flat <= 0:
        return 0.0, 1.0
    depth = fit.flat / fit.slope * _CONTEXT_UNIT if fit.slope > 0 else 0.0
    host = fit.load_us / fit.loaded_tokens / fit.flat if fit.loads and fit.loaded_tokens > 0 else 1.0
    return depth, min(1.0, host)
