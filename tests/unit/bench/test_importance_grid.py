"""Comparisons of ways in the grid of importance, from series of TTFTs."""

from __future__ import annotations

from typing import Any

from bench.importance_grid import best_of, compare_setting, compared, kinds_of


def series(system: str, ratio: float, ttft_ms: list[float], mb: float = 0.0) -> dict[str, Any]:
    return {"system": system, "ratio": ratio, "ttft_ms": sorted(ttft_ms)[1], "all_ttft_ms": ttft_ms, "mb": mb}


SETTING = [
    series("recompute", 0.0, [100.0, 110.0, 120.0]),
    series("everything", 0.0, [200.0, 200.0, 200.0], 40.0),
    series("hidden", 0.0, [80.0, 80.0, 80.0], 20.0),
    series("important", 0.1, [40.0, 40.0, 50.0], 5.0),
    series("on_demand", 0.1, [60.0, 60.0, 60.0], 5.0),
    series("default", 0.0, [84.0, 80.0, 88.0], 20.0),
    series("planned", 0.0, [101.0, 111.0, 121.0]),
    series("planned", 0.1, [44.0, 41.0, 52.0], 5.0),
]


def test_each_kind_of_request_is_compared_with_what_its_cell_can_do() -> None:
    """Exact requests of a cell with sparse copies have no hidden states; lossy ones may be read in part."""
    exact, lossy = compare_setting(SETTING, seed=1)

    assert (exact["best_exact"], exact["best_for_default"], exact["best_for_planned"]) == (
        "hidden",
        "hidden",
        "recompute",
    )
    assert exact["default"]["ratio"] == round(80 / 84, 3)
    assert lossy["best_for_planned"] == "important"
    assert lossy["in_part"] == {"ratio": 2.0, "low": 1.6, "high": 2.0}
    assert (lossy["bytes"], lossy["on_demand"]["ratio"]) == (4.0, 1.5)
    assert "planned" in lossy
    assert "default" not in lossy


def test_ratios_are_of_paired_questions() -> None:
    """The median of the pairs' ratios; equal pairs have no width."""
    assert compared([10.0, 20.0, 30.0], [5.0, 10.0, 15.0], seed=1) == {"ratio": 2.0, "low": 2.0, "high": 2.0}


def test_the_best_way_has_the_least_ttft() -> None:
    """By its median."""
    assert best_of(SETTING[:3])["system"] == "hidden"


def test_exact_ways_are_asked_exactly() -> None:
    """The planner is asked both ways."""
    assert [kinds_of(system, [0.1]) for system in ("hidden", "default", "important", "planned")] == [
        [0.0],
        [0.0],
        [0.1],
        [0.0, 0.1],
    ]
