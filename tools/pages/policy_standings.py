"""Standings of eviction policies over many pools, from the results of ``bench.policy_families``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

OURS = "thermocline"
OPTIMUM = "optimum"
TIE = 0.99
"""A policy ties with the best of a pool from this part of its hit ratio on."""


def standings(workloads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare every policy with the best of all in each pool, the policy itself among them.

    Returned in order of ``within``, the pools in which it ties with the best; ``shortfall`` is the mean part of the
    best hit ratio that it lacks, ``mean`` the mean hit ratio.
    """
    pools = [pool["ratios"] for workload in workloads for pool in workload["pools"]]
    names = [name for name in pools[0] if name != OPTIMUM]
    best = [max(pool[name] for name in names) for pool in pools]
    rows = [
        {
            "policy": name,
            "within": sum(pool[name] >= TIE * top for pool, top in zip(pools, best, strict=True)),
            "mean": statistics.mean(pool[name] for pool in pools),
            "shortfall": statistics.mean(
                1 - pool[name] / top if top else 0.0 for pool, top in zip(pools, best, strict=True)
            ),
        }
        for name in names
    ]
    return sorted(rows, key=lambda row: (-row["within"], row["shortfall"]))


def families(workloads: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return by how much the default policy's mean hit ratio of each family is over that of the best other policy."""
    found: dict[str, list[Mapping[str, float]]] = {}
    for workload in workloads:
        found.setdefault(workload["family"], []).extend(pool["ratios"] for pool in workload["pools"])
    over = {}
    for family, pools in found.items():
        means = {name: statistics.mean(pool[name] for pool in pools) for name in pools[0] if name != OPTIMUM}
        over[family] = means[OURS] / max(mean for name, mean in means.items() if name != OURS) - 1
    return over
