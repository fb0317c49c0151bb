"""Ratios between runs, with confidence intervals. Pure.

Intervals come from a moving-block bootstrap: whole blocks of neighbouring requests are drawn, because requests close in
time wait in the same queues, and independent draws would make intervals too narrow. They do not cover the variance
between two runs of the same command line; for that, repeat the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from thermocline.load.figures import Figures, Row
from thermocline.load.report import Report

RESAMPLES = 2000
CONFIDENCE = 0.95
_MOST_DRAWN_AT_ONCE = 4_000_000  # Values; a bound on memory.

Statistic = Callable[[np.ndarray], np.ndarray]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a run divided by that of the first; ``low`` to ``high`` is its confidence interval.

    ``ratio`` is None where a run lacks the figure; the interval where the figure is not one of single requests.
    """

    figure: str
    base: float | None
    value: float | None
    ratio: float | None
    low: float | None = None
    high: float | None = None


def _mean(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.mean(axis=-1))


def _ranked(fraction: float) -> Statistic:
    """Return a function to the nearest-rank quantile of each row, as in ``thermocline.client.figures``."""

    def of(values: np.ndarray) -> np.ndarray:
        place = min(values.shape[-1] - 1, int(fraction * values.shape[-1]))
        return np.asarray(np.partition(values, place, axis=-1)[..., place])

    return of


_STATISTICS: dict[str, Statistic] = {"mean": _mean, "p50": _ranked(0.5), "p99": _ranked(0.99)}
_TIMES = (("TTFT", "ttft_ms"), ("per output token", "token_ms"), ("end to end", "end_to_end_ms"))
_RATES = (
    ("requests/s", "requests_per_s"),
    ("input tokens/s", "input_tokens_per_s"),
    ("output tokens/s", "output_tokens_per_s"),
)


def compare(base: Report, other: Report) -> list[Ratio]:
    """Return all ratios of ``other`` to ``base``; the same reports give the same intervals."""
    found = []
    for title, field in _TIMES:
        ours, theirs = (_values(report.requests, field) for report in (base, other))
        for name, statistic in _STATISTICS.items():
            found.append(_time_ratio(f"{title} {name}, ms", ours, theirs, statistic))
    for title, field in _RATES:
        found.append(_plain(title, *(float(getattr(report.figures, field)) for report in (base, other))))
    found.append(_plain("goodput, requests/s", _good(base.figures), _good(other.figures)))
    found.append(_plain("cached part of input", _cached(base.figures), _cached(other.figures)))
    return found


def differences(base: Report, other: Report) -> list[str]:
    """Return the differences besides the server, which may explain the ratios, too."""
    found = [
        f"{name}: {ours} and {theirs}"
        for name, ours, theirs in (
            ("workload", base.workload, other.workload),
            ("seed", base.seed, other.seed),
            ("model", base.server.model, other.server.model),
            ("API", base.server.api, other.server.api),
            ("answers as long as asked", base.server.is_extended, other.server.is_extended),
            ("slo-ttft-ms", base.slo.ttft_ms, other.slo.ttft_ms),
            ("slo-itl-ms", base.slo.itl_ms, other.slo.itl_ms),
            ("processor of the client", base.client.hardware.processor, other.client.hardware.processor),
        )
        if ours != theirs
    ]
    for key in sorted(base.settings.keys() | other.settings.keys()):
        ours, theirs = base.settings.get(key), other.settings.get(key)
        if ours != theirs:
            found.append(f"{key}: {ours} and {theirs}")
    for report in (base, other):
        if report.figures.answered < report.figures.requests:
            failed = report.figures.requests - report.figures.answered
            found.append(f"{report.label}: {failed} of {report.figures.requests} requests failed and are left out")
    return found


def _values(rows: Sequence[Row], field: str) -> np.ndarray:
    """Return one field of all rows that have it, in order of the intended start: float64 ``(requests,)``."""
    values = [getattr(row, field) for row in sorted(rows, key=lambda row: (row.due_ms, row.number))]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _time_ratio(title: str, ours: np.ndarray, theirs: np.ndarray, statistic: Statistic) -> Ratio:
    if not ours.size or not theirs.size:
        return Ratio(figure=title, base=None, value=None, ratio=None)
    base, value = float(statistic(ours)), float(statistic(theirs))
    if base <= 0:
        return Ratio(figure=title, base=base, value=value, ratio=None)
    # Two generators: the number of values in one run must not change the draws of the other.
    drawn = [_resampled(run, statistic, np.random.default_rng(number)) for number, run in enumerate((ours, theirs))]
    ratios = drawn[1] / np.maximum(drawn[0], np.finfo(np.float64).tiny)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(figure=title, base=base, value=value, ratio=value / base, low=float(low), high=float(high))


def _resampled(values: np.ndarray, statistic: Statistic, rng: np.random.Generator) -> np.ndarray:
    """Return the statistic of RESAMPLES runs drawn as blocks of this one: float64 ``(RESAMPLES,)``."""
    count = values.size
    length = max(1, round(count ** (1 / 3)))  # The usual rate for a mean (Künsch 1989).
    blocks = -(-count // length)
    step = max(1, _MOST_DRAWN_AT_ONCE // count)
    parts = []
    for first in range(0, RESAMPLES, step):
        starts = rng.integers(count, size=(min(step, RESAMPLES - first), blocks, 1))
        # The run is a circle, so that its ends are drawn as often as its middle.
        places = (starts + np.arange(length)).reshape(len(starts), -1)[:, :count] % count
        parts.append(statistic(values[places]))
    return np.concatenate(parts)


def _plain(title: str, base: float | None, value: float | None) -> Ratio:
    ratio = value / base if base and value is not None else None
    return Ratio(figure=title, base=base, value=value, ratio=ratio)


def _good(figures: Figures) -> float | None:
    return figures.goodput.requests_per_s if figures.goodput is not None else None


def _cached(figures: Figures) -> float | None:
    return None if figures.cached_tokens is None else figures.cached_tokens / max(1, figures.input_tokens)
