"""The figures in the README, from committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.peers.command_line import GENERATED
from tools import peer_results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- begin: headlines, made by `python -m tools.reference_docs` -->\n", "<!-- end: headlines -->\n"


def readme(text: str) -> str:
    """The README with its figures as the results are now. Raises ValueError where the markers are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("the README must have one place for its figures")
    before, rest = text.split(BEGIN)
    return before + BEGIN + block() + END + rest.split(END)[1]


def block() -> str:
    """A table: what, how much, and where more is said."""
    rows = [*_newcomer(), *_tiers(), *_peers(), *_policy(), *_failures(), *_watching()]
    return "\n".join(["| what | measured | more |", "|---|---|---|", *rows, ""])


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["results"]
    return found


def _newcomer() -> list[str]:
    """From a fresh clone to the end of the first command."""
    first = _result("newcomer")["commands"][0]
    return [
        f"| `{first['command']}` of a fresh user in a fresh clone, downloads included | {first['seconds']:.0f} s "
        "| [quickstart](docs/quickstart.md) |"
    ]


def _tiers() -> list[str]:
    found = _result("ttft_ladder")
    tiers = found["by_tier"]
    cached = ", ".join(
        f"{'object store' if name == 'remote' else name} {tiers[name]['ttft_ms']:,.0f} ms"
        for name in ("device", "host", "disk", "remote")
    )
    return [
        f"| time to first token of {found['tokens']:,} tokens, by where they are | {cached}; computed again "
        f"{tiers['recomputed']['ttft_ms']:,.0f} ms | [data plane](docs/results/data-plane.md) |"
    ]


def _peers() -> list[str]:
    """What was compared with vLLM, alone and with LMCache's disk tier, a row for each run; met or not."""
    found = peer_results.read(RESULTS)
    titles = {
        "documents": "documents twice the device's size",
        "burst": "eight at once on a new document",
        "unshared": "nothing shared",
    }
    peers = {"vllm": "vLLM", "lmcache-disk": "vLLM + LMCache"}
    rows = []
    for workload, title in titles.items():
        for run in found[workload]["runs"].values():
            targets = [target for target in run["results"]["targets"] if target["peer"] in peers]
            if targets and run["results"]["model"] == GENERATED:
                shown = "; ".join(f"{target['says']} {target['ratio']:.2f}×" for target in targets)
                rows.append(
                    f"| {title}: times better than {peers[targets[0]['peer']]} | {shown} "
                    "| [beside other servers](docs/results/peers.md) |"
                )
    return rows


def _policy() -> list[str]:
    found = _result("policy_hit_ratio")
    blocks = "6000"
    ratios = {name: one["ratio"] for name, one in found["by_blocks"][blocks].items()}
    known = ("thermocline", "optimum", "hotprefix, exact")
    others = {name: ratio for name, ratio in ratios.items() if name not in known}
    best = max(others, key=others.__getitem__)
    return [
        f"| hit ratio on a production trace of {found['requests']:,} requests, {int(blocks):,} blocks | "
        f"{ratios['thermocline']:.3f}; LRU {ratios['lru']:.3f}, best other ({best}) {ratios[best]:.3f}, offline "
        f"optimum {ratios['optimum']:.3f} | [policies](docs/results/policies.md) |"
    ]


def _failures() -> list[str]:
    chaos, takes, losses = _result("chaos"), _result("take_over"), _result("worker_loss")
    return [
        f"| {chaos['faults']} faults in a live cell under load | {len(chaos['violations'])} answers lost, doubled or "
        "changed | [failures](docs/results/failures.md) |",
        f"| a standby scheduler takes over | p50 {takes['take_over_ms']['p50']:.0f} ms, p99 "
        f"{takes['take_over_ms']['p99']:.0f} ms | [failures](docs/results/failures.md) |",
        f"| longest pause of a stream whose worker is killed | p50 {losses['longest_pause_ms']['p50']:.0f} ms, p99 "
        f"{losses['longest_pause_ms']['p99']:.0f} ms | [failures](docs/results/failures.md) |",
    ]


def _watching() -> list[str]:
    share = _result("metric_calls")["share_of_cpu"]
    return [f"| all metrics, of CPU time | {share:.1%} | [watching](docs/results/watching.md) |"]
