"""The figures at a glance, from committed results: five in the README, all of them on a page of their own.

A figure never stands alone: beside it stand its conditions (model, load, storage, hardware) and where it falls short.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.command_line import BUNDLED, GENERATED
from tools import peer_results, targets

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- begin: headlines, made by `python -m tools.reference_docs` -->\n", "<!-- end: headlines -->\n"

MODELS = {
    GENERATED: "Llama, 88M parameters, random weights",
    BUNDLED: "thermocline-mha, 2.3M parameters, trained",
}
WORKLOADS = {
    "documents": "documents of twice the device's size",
    "burst": "eight at once on a new document",
    "chat": "conversations",
    "fits": "documents that fit the device",
    "unshared": "nothing shared",
}
"""What a reader calls a workload of ``bench.peers``."""
RATIOS = {
    "requests_per_s": "requests/s",
    "ttft_mean_ms": "mean TTFT",
    "ttft_p50_ms": "TTFT p50",
    "first_ttft_mean_ms": "mean TTFT of first questions",
    "repeat_ttft_mean_ms": "mean TTFT of repeated questions",
    "token_p50_ms": "time per token",
    "prefill_tokens_per_s": "prefill",
    "decode_tokens_per_s": "decode",
    "output_tokens_per_s": "output tokens/s",
}
"""What a reader calls a ratio; those that the page of other servers shows of a workload are shown here."""

_LENGTH = re.compile(r"([\d,]+)(?= tokens)")

_INTRODUCTION = """\
# Figures at a glance

Made by `python -m tools.reference_docs` from `bench/results/`. Each row says what was measured, under which conditions,
and where it falls short; the page behind it says how. The machine is client, broker and server at once. No figure was
measured on a GPU.
"""


TESTS_S = 600
"""What ``./task test`` may take."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. ``short`` lists where the figure falls short; ``page`` is relative to ``docs/results``."""

    what: str
    conditions: str
    measured: str
    short: tuple[str, ...]
    page: str
    machine: str


def readme(text: str) -> str:
    """The README with its figures as the results are now. Raises ValueError where the markers are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError("the README must have one place for its figures")
    before, rest = text.split(BEGIN)
    return before + BEGIN + block(RESULTS) + END + rest.split(END)[1]


def block(results: Path) -> str:
    """The README's table of five, and how many targets were met."""
    rows = [make(results) for make in (_tiers, _peers_at_a_glance, _chaos, _pause, _policies)]
    found = targets.read(results)
    met = sum(target.is_met for target in found)
    link = "(docs/results/headlines.md"
    return "\n".join(
        [
            "| measured | result | falls short |",
            "|---|---|---|",
            *(
                f"| [{row.what}](docs/results/{row.page}): {row.conditions} | {row.measured} | {_listed(row.short)} |"
                for row in rows
            ),
            "",
            f"{met} of {len(found)} [targets]{link}#targets) are met. [All figures]{link}).",
            "",
        ]
    )


def page(results: Path = RESULTS) -> str:
    """Every figure with its machine, then every target, those that are missed first."""
    rows = [
        f"| [{row.what}]({row.page}) | {row.conditions} | {row.machine} | {row.measured} | {_listed(row.short)} |"
        for row in _figures(results)
    ]
    found = sorted(targets.read(results), key=lambda target: target.is_met)
    met = sum(target.is_met for target in found)
    verdicts = [
        f"| `{target.result}` | {target.says} | {target.measured} | {target.wanted} "
        f"| {'met' if target.is_met else '**not met**'} |"
        for target in found
    ]
    head = ["| what | conditions | machine | measured | falls short |", "|---|---|---|---|---|"]
    below = ["", "## Targets", "", f"{met} of {len(found)} are met.", ""]
    table = ["| result | what | measured | target | |", "|---|---|---|---|---|"]
    return "\n".join([_INTRODUCTION, *head, *rows, *below, *table, *verdicts, ""])


def _figures(results: Path) -> Iterator[Figure]:
    for measured in sorted(results.glob("newcomer_*.json")):
        yield _newcomer(results, measured.stem)
    yield _tiers(results)
    yield from _peers(results)
    yield _policies(results)
    yield _chaos(results)
    yield _take_over(results)
    yield _pause(results)
    yield _metrics(results)


def _listed(short: tuple[str, ...]) -> str:
    return "; ".join(short) or "-"


def _read(results: Path, name: str) -> tuple[dict[str, Any], str]:
    """A result, and the machine that it was measured on."""
    document = json.loads((results / f"{name}.json").read_text("utf-8"))
    return document["results"], _machine(document["hardware"])


def _machine(hardware: dict[str, Any]) -> str:
    return (
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, "
        f"load {hardware['load_average_1min']:.1f}"
    )


def _newcomer(results: Path, name: str) -> Figure:
    """From a fresh clone to the end of the first command, and of all of them."""
    found, machine = _read(results, name)
    first, *later = found["commands"]
    then = "; then " + ", ".join(f"`{one['command']}` {one['seconds']:,.0f} s" for one in later)
    tests = found["commands"][-1]
    beside = f", beside {found['busy_loops']} busy loops" if found["busy_loops"] else ""
    who = "root" if found["is_root"] else "an ordinary user"
    slow = f"; tests aim at {TESTS_S} s on two quiet cores" if tests["seconds"] > TESTS_S else ""
    return Figure(
        what="commands of a fresh user in a fresh clone",
        conditions=f"{found['python']}, PyTorch with CUDA, downloads included{beside}, as {who}, {MODELS[BUNDLED]}",
        measured=f"`{first['command']}` {first['seconds']:,.0f} s{then} ({tests['said'].partition(' in ')[0]})",
        short=(f"`.venv` takes {found['venv_mb'] / 1e3:.1f} GB{slow}",),
        page="../how-to/install.md",
        machine=machine,
    )


def _tiers(results: Path) -> Figure:
    found, machine = _read(results, "ttft_ladder")
    times = {name: tier["ttft_ms"] for name, tier in found["by_tier"].items()}
    names = {"device": "device", "host": "host", "disk": "disk", "remote": "object store"}
    cached = ", ".join(f"{title} {times[name]:,.0f} ms" for name, title in names.items())
    return Figure(
        what="TTFT by the tier that holds the prefix",
        conditions=f"{found['tokens']:,} tokens, {MODELS[GENERATED]}, {found['dtype']}, one at a time",
        measured=f"{cached}; recomputed {times['recomputed']:,.0f} ms",
        short=("object store is a directory on the same disk",),
        page="data-plane.md",
        machine=machine,
    )


def _peers(results: Path) -> list[Figure]:
    """A row for each run beside another server, with everything in which the other is faster."""
    found = peer_results.read(results)
    return [_beside(workload, run) for workload in found for run in found[workload]["runs"].values()]


def _peers_at_a_glance(results: Path) -> Figure:
    """Documents larger than the device, against the peer with the most targets; with what any run misses."""
    found = peer_results.read(results)
    chosen = max(found["documents"]["runs"].values(), key=lambda run: len(run["results"]["targets"]))
    runs = [run["results"] for workload in found.values() for run in workload["runs"].values()]
    slower = [line for figures in runs for line in _slower_decode(figures)]
    missed = _together([(figures["model"], row) for figures in runs for row in figures["targets"] if not row["is_met"]])
    return dataclasses.replace(_beside("documents", chosen), short=(*missed, *slower))


def _together(missed: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Misses of one target at several lengths as one: ``burst of 512, 2,048 tokens 1.01×, 1.33× (target 3×)``."""
    grouped: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for model, row in missed:
        before, length, after = [*_LENGTH.split(row["says"], maxsplit=1), "", ""][:3]
        grouped.setdefault((model, f"{row['target']:g}", before, after), []).append((length, row["ratio"]))
    return [
        f"{before}{', '.join(length for length, _ in rows)}{after} {', '.join(f'{ratio:.2f}×' for _, ratio in rows)}, "
        f"target {target}×" + ("" if model == GENERATED else f" ({MODELS[model]})")
        for (model, target, before, after), rows in grouped.items()
    ]


def _beside(workload: str, run: dict[str, Any]) -> Figure:
    figures = run["results"]
    ours, peer = list(figures["systems"])[:2]
    shown = {name for name, _ in peer_results.columns(workload) if name in RATIOS}
    ratios = {
        f"{_pass(passed)}, {RATIOS[name]}": ratio["median"]
        for passed, by_figure in figures["ratios"][f"{ours} to {peer}"].items()
        for name, ratio in by_figure.items()
        if name in shown
    }
    better = [f"{row['says']} {row['ratio']:.2f}×" for row in figures["targets"] if row["is_met"]]
    if not figures["targets"]:
        better = [f"{says} {ratio:.2f}×" for says, ratio in ratios.items() if ratio >= 1]
    slower = [f"{says} {ratio:.2f}×" for says, ratio in ratios.items() if ratio < 1]
    titles = [figures["systems"][name]["title"] for name in (ours, peer)]
    bounds = figures["bounds"]
    return Figure(
        what=f"{WORKLOADS[workload]}: {titles[0]} over {titles[1]}",
        conditions=f"{MODELS[figures['model']]}, {bounds['dtype']}, device KV {bounds['device_tokens']:,} tokens, "
        f"{figures['repeats']} round{'s' if figures['repeats'] > 1 else ''}",
        measured="; ".join(better) or "no target met",
        short=(*_missed(figures), *slower),
        page="peers.md",
        machine=_machine(run["hardware"]),
    )


def _pass(name: str) -> str:
    """``one at a time, 512 tokens`` of ``single_512``."""
    kind, _, size = name.partition("_")
    title = {"single": "one at a time", "eight": "eight at once"}.get(kind, kind)
    return f"{title}, {int(size):,} tokens" if size else title


def _missed(figures: dict[str, Any]) -> list[str]:
    """Targets of a run that were not met."""
    return [
        f"{row['says']} {row['ratio']:.2f}×, target {row['target']:g}×"
        + ("" if figures["model"] == GENERATED else f" ({MODELS[figures['model']]})")
        for row in figures["targets"]
        if not row["is_met"]
    ]


def _slower_decode(figures: dict[str, Any]) -> list[str]:
    """Where another server decodes a single stream faster."""
    found = []
    for pair, passes in figures["ratios"].items():
        peer = figures["systems"][pair.split(" to ")[1]]["title"]
        for passed, by_figure in passes.items():
            ratio = by_figure["decode_tokens_per_s"]["median"]
            if passed.startswith("single_") and ratio < 1:
                tokens = int(passed.removeprefix("single_"))
                found.append(f"decode after {tokens:,} tokens {ratio:.2f}× {peer}'s")
    return found


def _policies(results: Path) -> Figure:
    """Every pool size: ours, the best of the other policies, and what knowing the future would give."""
    found, machine = _read(results, "policy_hit_ratio")
    cells, behind, lead = [], [], {}
    for blocks, by_policy in found["by_blocks"].items():
        ratios = {name: one["ratio"] for name, one in by_policy.items()}
        ours, optimum = ratios.pop("thermocline"), ratios.pop("optimum")
        ratios.pop("hotprefix, exact", None)
        best = max(ratios, key=ratios.__getitem__)
        cells.append(f"{int(blocks):,}: {ours:.3f} / {ratios[best]:.3f} / {optimum:.3f}")
        lead[blocks] = ours - ratios[best]
        if ours < ratios[best]:
            behind.append(f"{best} is better at {int(blocks):,} blocks: {ratios[best]:.3f} to {ours:.3f}")
    least = min(lead, key=lead.__getitem__)
    return Figure(
        what="hit ratio, ours / best other policy / offline optimum",
        conditions=f"{found['requests']:,} requests of one production trace, by blocks in the pool; no model",
        measured="; ".join(cells),
        short=tuple(behind) or (f"leads by {lead[least]:.3f} at {int(least):,} blocks",),
        page="policies.md",
        machine=machine,
    )


def _chaos(results: Path) -> Figure:
    found, machine = _read(results, "chaos")
    endings, attempts = found["endings"], found["attempts"]
    errors = endings.get("error", 0)
    kinds = ", ".join(
        f"{count:,} {why.partition(': ')[2]}"
        for why, count in sorted(found["excused_errors"].items(), key=lambda entry: -entry[1])
    )
    pause = found["stream_pause_s_on_worker_loss"]
    return Figure(
        what=f"{found['faults']} faults in {found['seconds'] / 60:,.0f} minutes",
        conditions=f"{found['workers']} workers, {found['schedulers']} schedulers, {MODELS[BUNDLED]}, float32",
        measured=f"{len(found['violations'])} answers lost, doubled or changed",
        short=(
            f"{errors:,} of {attempts:,} requests ended in an error ({kinds})",
            f"streams paused up to {pause['max']:.1f} s when workers were lost, p99 {pause['p99']:.1f} s",
        ),
        page="failures.md",
        machine=machine,
    )


def _take_over(results: Path) -> Figure:
    found, machine = _read(results, "take_over")
    times = found["take_over_ms"]
    return Figure(
        what="a standby scheduler takes over",
        conditions=f"{found['kills']} kills, {found['settings']['clients']} clients, {MODELS[BUNDLED]}, float32",
        measured=f"p50 {times['p50']:,.0f} ms, p99 {times['p99']:,.0f} ms",
        short=(f"streams paused up to {found['longest_pause_ms']['max']:,.0f} ms",),
        page="failures.md",
        machine=machine,
    )


def _pause(results: Path) -> Figure:
    found, machine = _read(results, "worker_loss")
    hurt, _ = _read(results, "chaos")
    pause, under_faults = found["longest_pause_ms"], hurt["stream_pause_s_on_worker_loss"]
    return Figure(
        what="longest pause of a stream whose worker is killed",
        conditions=f"{found['kills']} single kills, {found['settings']['clients']} clients, {MODELS[BUNDLED]}, float32",
        measured=f"p50 {pause['p50']:,.0f} ms, p99 {pause['p99']:,.0f} ms",
        short=(f"p99 {under_faults['p99']:.1f} s in the run of {hurt['faults']} faults",),
        page="failures.md",
        machine=machine,
    )


def _metrics(results: Path) -> Figure:
    found, machine = _read(results, "metric_calls")
    return Figure(
        what="CPU time that all metrics take",
        conditions=f"{found['requests']} requests, {found['at_once']} at once, {MODELS[BUNDLED]}, float32",
        measured=f"{found['share_of_cpu']:.1%}",
        short=("counted calls times the cost of one; end to end it is within the noise of shared cores",),
        page="watching.md",
        machine=machine,
    )
