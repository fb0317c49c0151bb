"""Prompt tokens by their source: counts, shares, rates and hit ratios. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.gateway.views.cache_view import HIT_TIERS

RESTORED, COMPUTED = "hidden", "computed"

SOURCES = {tier: f"hit_tokens_{tier}" for tier in HIT_TIERS} | {
    RESTORED: "restored_tokens_planned",
    COMPUTED: "prefill_tokens_planned",
}
"""The scheduler's counter for each source: a tier, hidden states that KV was restored from, or the model."""


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt ``tokens`` by source, and the share of each; ``hit_ratio`` is the share that was not computed.

    Shares and ratio are None where there is no token.
    """

    tokens: dict[str, int]
    shares: dict[str, float | None]
    hit_ratio: float | None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Changes within ``interval_s``: the ratios of that time alone, and the rate of every counter that moved."""

    interval_s: float
    recent: Ratios
    per_second: dict[str, float]


def ratios_of(counters: Mapping[str, int]) -> Ratios:
    """Return the ratios of a cell's counters, or of differences between two readings."""
    tokens = {source: counters.get(counter, 0) for source, counter in SOURCES.items()}
    whole = sum(tokens.values())
    shares = {source: count / whole if whole else None for source, count in tokens.items()}
    return Ratios(tokens=tokens, shares=shares, hit_ratio=(whole - tokens[COMPUTED]) / whole if whole else None)


def rates_of(before: Mapping[str, int], after: Mapping[str, int], interval_s: float) -> Rates:
    """Return the rates between two readings of a cell's counters, ``interval_s`` apart.

    A counter that is lower than before belongs to a restarted cell, and counts from 0.
    """
    moved = {}
    for name, count in after.items():
        earlier = before.get(name, 0)
        moved[name] = count - earlier if count >= earlier else count
    return Rates(
        interval_s=interval_s,
        recent=ratios_of(moved),
        per_second={name: count / interval_s for name, count in moved.items() if count},
    )


def ratio_lines(ratios: Ratios, rates: Rates | None) -> list[str]:
    """Return a table of tokens, shares and rates by source, and the hit ratio in the last line."""
    head = f"  {'prompt tokens from':<20}{'in all':>16}{'share':>9}"
    if rates is not None:
        head += f"{f'last {rates.interval_s:.1f} s':>14}{'share':>9}"
    lines = [head.rstrip()]
    for source, count in ratios.tokens.items():
        line = f"  {source:<20}{count:>16,}{_percent(ratios.shares[source]):>9}"
        if rates is not None:
            per_second = rates.recent.tokens[source] / rates.interval_s
            line += f"{f'{per_second:,.0f}/s':>14}{_percent(rates.recent.shares[source]):>9}"
        lines.append(line)
    line = f"  {'hit ratio':<20}{'':>16}{_percent(ratios.hit_ratio):>9}"
    return [*lines, line if rates is None else f"{line}{'':>14}{_percent(rates.recent.hit_ratio):>9}"]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
