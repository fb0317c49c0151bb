"""Runs beside other servers: tables of what was measured, misses, and what a burst could reach at the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tools.pages.peers import medians, missed_together, slower_decode, tables, tokens_in
from tools.pages.renderer import RESULTS, render


@pytest.fixture
def run() -> dict[str, Any]:
    """Two systems in two passes, one of which the peer was not asked."""
    ratio = {"median": 0.5, "least": 0.25, "most": 0.75}
    return {
        "model": "generated",
        "systems": {
            "ours": {
                "title": "Ours",
                "passes": {
                    "single_512": {"median": {"ttft_mean_ms": 123.4, "cached_part": 0.98}},
                    "host": {"median": {"ttft_mean_ms": 12.34}},
                },
            },
            "peer": {"title": "Theirs", "passes": {"single_512": {"median": {"ttft_mean_ms": 61.7}}}},
        },
        "ratios": {"ours to peer": {"single_512": {"ttft_mean_ms": ratio, "decode_tokens_per_s": ratio}}},
        "targets": [
            {"says": f"burst of {tokens} tokens, mean", "target": 3.0, "ratio": reached, "is_met": reached >= 3}
            for tokens, reached in (("1,024", 1.5), ("512", 2.0), ("256", 3.0))
        ],
    }


def test_a_pass_is_a_table_of_what_any_system_has_there(run: dict[str, Any]) -> None:
    """Medians of each system that was asked, then ratios with the least and the most; other figures have no column."""
    columns = {"ttft_mean_ms": "TTFT", "cached_part": "cached", "requests_per_s": "requests/s"}

    first, second = tables(run, columns)

    assert first == (
        ["single_512", "TTFT", "cached"],
        [["Ours", "123", "0.98"], ["Theirs", "61.7", ""], ["*Ours to Theirs*", "0.50 (0.25 to 0.75)", ""]],
    )
    assert second == (["host", "TTFT"], [["Ours", "12.3"]])


def test_misses_that_differ_in_a_length_are_one(run: dict[str, Any]) -> None:
    """In the order of the targets; what was met is not among them."""
    (missed,) = missed_together([run])

    assert missed == {
        "model": "generated",
        "target": 3.0,
        "says": "burst of 1,024, 512 tokens, mean",
        "ratios": [1.5, 2.0],
    }


def test_a_peer_that_decodes_faster_is_named(run: dict[str, Any]) -> None:
    """With the tokens before what it decodes; a ratio in words says its pass and figure."""
    assert slower_decode([run]) == [{"tokens": 512, "ratio": 0.5, "peer": "Theirs"}]
    assert medians(run, {"ttft_mean_ms": "mean TTFT"}) == {"one at a time, 512 tokens, mean TTFT": 0.5}


def test_a_target_names_a_length() -> None:
    """With or without commas; one without a length is a mistake."""
    assert tokens_in("burst on a new document of 2,048 tokens, mean TTFT") == 2048
    with pytest.raises(ValueError, match="no length"):
        tokens_in("cold, mean TTFT")


def test_a_target_stands_beside_what_the_linear_layers_alone_take(tmp_path: Path) -> None:
    """512 tokens of 200 MFLOP at the better of two rates, 400 GFLOP/s, are 256 ms; a third of 600 is less."""
    results = shutil.copytree(RESULTS, tmp_path / "results")
    engine = json.loads((results / "engine_speed_bfloat16.json").read_text(encoding="utf-8"))
    engine["results"]["linear_flops_per_token"] = 2e8
    engine["results"]["limits"]["gflop_per_s"] = {"qkv": {"shape": [512, 8, 16], "onednn": 380.0, "fused": 400.0}}
    (results / "engine_speed_bfloat16.json").write_text(json.dumps(engine), encoding="utf-8")
    burst = json.loads((results / "peers_burst.json").read_text(encoding="utf-8"))
    systems = burst["runs"]["generated: ours-disk, lmcache-disk"]["results"]["systems"]
    for name, ttft_ms in (("ours-disk", 400.0), ("lmcache-disk", 600.0)):
        systems[name]["passes"]["burst_512"]["median"]["ttft_mean_ms"] = ttft_ms
    (results / "peers_burst.json").write_text(json.dumps(burst), encoding="utf-8")

    assert "| 512 | 600 | 200 | 400 | 256 |" in render("results/peers.md", results)
