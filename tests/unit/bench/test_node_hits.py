"""What nodes that share find is compared with one node of as much memory."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from bench.node_hits import TARGET, measure, scale_of
from tools.pages.renderer import RESULTS, render


def options(**other: object) -> argparse.Namespace:
    """A run of seconds."""
    known = {
        "trace": None,
        "workloads": "retrieval",
        "seeds": "1",
        "requests": 120,
        "memory": 0.6,
        "network_gb_s": 12.5,
        "hardware": "h800",
        "model": "llama-3.1-8b",
        "time_scales": "1,2",
    }
    return argparse.Namespace(**known | other)


def page(folder: Path, workload: dict[str, Any]) -> str:
    """The page of the data plane with these figures."""
    results = shutil.copytree(RESULTS, folder / "results")
    document = json.loads((results / "ttft_ladder.json").read_text(encoding="utf-8"))
    about = {"memory": 0.6, "network_gb_s": 12.5, "hardware": "h800", "model": "llama-3.1-8b", "workers": 4}
    text = json.dumps(document | {"results": about | {"workloads": [workload]}})
    (results / "node_hits.json").write_text(text, encoding="utf-8")
    return render("results/data-plane.md", results)


def test_each_run_has_both_ways_and_the_target_is_for_the_worst(tmp_path: Path) -> None:
    """Two and four nodes, with and without sharing; what is lent is lent by those that share."""
    (found,) = measure(options())

    (run,) = found["runs"]
    assert [(row["nodes"], row["shares"]) for row in run["rows"]] == [(2, True), (2, False), (4, True), (4, False)]
    assert all(row["borrowed_tokens"] == 0 for row in run["rows"] if not row["shares"])
    assert any(row["borrowed_tokens"] > 0 for row in run["rows"] if row["shares"])
    assert found["of_one_node"] == min(row["of_one_node"] for row in run["rows"] if row["shares"])
    assert found["target_of_one_node"] == TARGET
    assert 0 < run["one_node"] < 1
    assert f"| retrieval | 1 | {run['device_tokens']:,} |" in page(tmp_path, found)


def test_a_trace_comes_by_its_flag(tmp_path: Path) -> None:
    """At each speed it has one run, since nothing in it is drawn."""
    about = {"input_length": 1024, "output_length": 4}
    lines = [json.dumps(about | {"timestamp": at, "hash_ids": [at % 3, 9 + at]}) for at in range(40)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines), encoding="utf-8")

    found = measure(options(trace=trace, workloads="", requests=40))

    assert [each["of"] for each in found] == ["trace", "trace, speed ×2"]
    assert [scale_of(each["of"]) for each in found] == [1.0, 2.0]
    assert [run["requests"] for each in found for run in each["runs"]] == [40, 40]
