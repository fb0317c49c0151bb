"""The page beside other servers: what a burst could reach at the best."""

from typing import Any

import pytest

from tools.peer_results import page

ENGINE: dict[str, Any] = {
    "linear_flops_per_token": 2e8,
    "limits": {"gflop_per_s": {"qkv": {"shape": [512, 8, 16], "onednn": 380.0, "fused": 400.0}}},
}


def system(title: str, ttft_ms: float) -> dict[str, Any]:
    return {"title": title, "passes": {"burst_512": {"median": {"ttft_mean_ms": ttft_ms}}}}


@pytest.fixture
def found() -> dict[str, Any]:
    target = {
        "says": "burst on a new document of 512 tokens, mean TTFT",
        "ours": "ours",
        "peer": "lmcache",
        "ratio": 1.5,
        "ratio_min_max": [1.4, 1.6],
        "target": 3.0,
        "is_met": False,
    }
    results = {
        "model": "generated",
        "systems": {"ours": system("Ours", 400.0), "lmcache": system("Theirs", 600.0)},
        "ratios": {},
        "greedy_answers_equal": {},
        "targets": [target],
    }
    hardware = {"processor": "one", "cores": 2, "memory_gib": 4}
    run = {"results": results, "command": "c", "commit": "1", "date": "2026-01-01", "hardware": hardware}
    return {"burst": {"runs": {"generated: ours, lmcache": run}}}


def test_a_target_stands_beside_what_the_linear_layers_alone_take(found: dict[str, Any]) -> None:
    """512 tokens of 200 MFLOP at the better of two rates, 400 GFLOP/s, are 256 ms; a third of 600 is less."""
    text = page(found, ENGINE)

    assert "| 512 | 600 | 200 | 400 | 256 |" in text
    assert "**not met**" in text


def test_nothing_is_said_of_limits_that_nobody_measured(found: dict[str, Any]) -> None:
    """Nor of another model's."""
    assert "at the limit" not in page(found)
    found["burst"]["runs"]["generated: ours, lmcache"]["results"]["model"] = "bundled"
    assert "at the limit" not in page(found, ENGINE)
