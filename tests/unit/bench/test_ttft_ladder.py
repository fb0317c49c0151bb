"""The ladder's report: what was not served is said, and targets are judged from what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench import raw_link
from bench.ttft_ladder import NEIGHBOUR, NEIGHBOUR_DISK, RUNGS, report
from tools.pages import targets
from tools.pages.renderer import RESULTS, render

TIMES = {name: [100.0, 110.0, 120.0] for name in RUNGS} | {"recomputed": [4000.0, 4400.0, 4800.0], NEIGHBOUR_DISK: []}

RAW = {1: [30.0, 33.0, 90.0], 2: [20.0, 22.0, 29.0]}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The committed results with a ladder of these times."""
    made = shutil.copytree(RESULTS, tmp_path / "results")
    file = made / "ttft_ladder.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    about = {"tokens": 4096, "question_tokens": 32, "repeats": 3, "dtype": "float32", "network": "a wire"}
    file.write_text(json.dumps(document | {"results": about | report(TIMES, RAW)}), encoding="utf-8")
    return made


def test_a_rung_that_nobody_serves_has_no_times() -> None:
    """It is there, with the word that it was not served."""
    rungs = report(TIMES, RAW)["by_tier"]

    assert rungs[NEIGHBOUR_DISK] == {"where": "disk of another node", "is_served": False}
    assert all(rungs[name]["is_served"] for name in RUNGS if name != NEIGHBOUR_DISK)


def test_ratios_are_those_of_the_medians() -> None:
    """Computing takes 4400 ms, the neighbour's memory 165 and one's own 110."""
    found = report(TIMES | {NEIGHBOUR: [160.0, 165.0, 200.0]}, RAW)

    assert found["neighbour_over_host"] == 1.5
    assert found["limit_of_neighbour_over_host"] == pytest.approx((110 + 22) / 110)
    assert found["recomputed_over_neighbour"] == pytest.approx(4400 / 165)


def test_the_page_has_every_rung(results: Path) -> None:
    """Those with times and the one without."""
    text = render("results/data-plane.md", results)

    assert "| host memory of another node, over TCP | 110 | 100 to 120 | 40.0× |" in text
    assert "| disk of another node | not served | | |" in text
    assert "| object store, 50 ms away | 110 |" in text
    assert "a wire" in text
    assert "take 22 ms over the same link: 1.20×" in text
    assert "other node 110 ms" in render("parts/readme.md", results)


def test_bytes_alone_cross_a_link() -> None:
    """All of them in each repeat, with one stream and with two."""
    found = raw_link.between([], [], "127.0.0.1", 1_000_001, repeats=3)

    assert {streams: len(times) for streams, times in found.items()} == dict.fromkeys(raw_link.STREAMS, 3)
    assert all(seconds > 0 for times in found.values() for seconds in times)


@pytest.mark.parametrize(("measured", "is_met"), [(1.5, True), (1.51, False)])
def test_targets_of_ratios_bound_from_their_side(measured: float, is_met: bool) -> None:
    """The neighbour's memory takes at most half as much again as one's own; sharing finds at least 0.95 of one node."""
    (near,) = targets.of("ladder", {"neighbour_over_host": measured, "target_neighbour_over_host": 1.5})
    (hits,) = targets.of("hits", {"of": "trace", "of_one_node": measured - 0.56, "target_of_one_node": 0.95})

    assert (near.is_met, near.wanted) == (is_met, "≤ 1.5×")
    assert (hits.is_met, hits.wanted) == (not is_met, "≥ 0.95×")
    assert hits.says.endswith("trace")
