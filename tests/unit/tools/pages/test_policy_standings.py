"""Standings of policies over pools."""

from __future__ import annotations

import pytest

from tools.pages.policy_standings import families, standings

WORKLOADS = [
    {
        "family": "chat",
        "pools": [
            {"ratios": {"lru": 0.50, "arc": 0.40, "thermocline": 0.496, "optimum": 0.9}},
            {"ratios": {"lru": 0.20, "arc": 0.40, "thermocline": 0.40, "optimum": 0.9}},
        ],
    },
    {"family": "scans", "pools": [{"ratios": {"lru": 0.0, "arc": 0.0, "thermocline": 0.0, "optimum": 0.1}}]},
]


def test_policies_stand_by_the_pools_in_which_they_tie_with_the_best() -> None:
    """The optimum is no policy; a pool without a hit is a tie of all."""
    rows = standings(WORKLOADS)

    assert [(row["policy"], row["within"]) for row in rows] == [("thermocline", 3), ("arc", 2), ("lru", 2)]
    assert rows[0]["shortfall"] == pytest.approx((1 - 0.496 / 0.5) / 3)
    assert rows[2]["mean"] == pytest.approx(0.7 / 3)


def test_families_compare_means() -> None:
    """Of all pools of a family, with the policy that is best on average there."""
    assert families(WORKLOADS[:1]) == {"chat": pytest.approx(0.896 / 0.8 - 1)}
