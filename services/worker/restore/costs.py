"""From figures at a few lengths to the cost of one token at any length, for a planner. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.restore.figures import RestorationFigure, RestorationProfile
from shared.errors import ConfigError
from shared.messages.worker_events import RestorationCosts

_US = 1e6

_TIMES_S = (1e-15, 1e6)
"""Bounds of what a measurement gives for a token in a layer; sums and quotients of such times are finite."""

_MOST_TOKENS = 10**9


def costs_of(profile: RestorationProfile) -> RestorationCosts:
    """Return the costs of one token in one layer by a profile.

    Means are over tokens, so that long prefixes, where it matters, count for more. Computing a layer of N tokens takes
    ``N token_us + N² pair_us / 2`` (HCache 3.2, T_rec), so its time per token is a line over N / 2: the one that is
    nearest to the figures, among those that are nowhere negative. Raises ConfigError without figures, and for figures
    that no measurement gives.
    """
    figures, layers = profile.figures, profile.geometry.layers
    if layers < 1 or not figures or not all(_can_be(each) for each in figures):
        raise ConfigError("a profile of restoration has no figures to calculate with")
    tokens = sum(each.tokens for each in figures)
    hidden_s = sum(each.tokens * each.compute_hidden_s for each in figures) / tokens
    link_s = sum(each.tokens * each.io_kv_s for each in figures) / tokens
    whole = [_whole_layer_s(each, layers) for each in figures]
    token_s, pair_s = _line([each.tokens / 2 for each in figures], whole)
    return RestorationCosts(
        hidden=profile.hidden,
        hidden_us=hidden_s * _US,
        token_us=token_s * _US,
        pair_us=pair_s * _US,
        link_bytes_per_us=profile.kv_bytes / (link_s * _US),
    )


def _can_be(figure: RestorationFigure) -> bool:
    """Return whether a measurement can have given these figures."""
    least_s, most_s = _TIMES_S
    times = (figure.io_kv_s, figure.compute_token_s)
    is_timed = all(least_s <= each <= most_s for each in times) and 0 <= figure.compute_hidden_s <= most_s
    return is_timed and 1 <= figure.tokens <= _MOST_TOKENS


def _whole_layer_s(figure: RestorationFigure, layers: int) -> float:
    """Return the seconds that a token takes in a layer that is computed to its end.

    The last layer was computed as far as its K and V only, which takes as long as from a hidden state. So the others
    took longer than the mean; figures that contradict this were disturbed, and then the mean is the best estimate.
    """
    if layers == 1:
        return figure.compute_token_s
    return max(figure.compute_token_s, (figure.compute_token_s * layers - figure.compute_hidden_s) / (layers - 1))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of the line ``a + b x`` nearest to the points, by least squares; neither is below 0.

    All coordinates of the points are above 0.
    """
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    if slope <= 0:
        return mean_y, 0.0
    if mean_y < slope * mean_x:
        return 0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
    return mean_y - slope * mean_x, slope
