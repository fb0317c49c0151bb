"""The page that compares with other servers, from committed results of ``bench.peers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.peers.command_line import GENERATED
from bench.peers.passes import BURST_TOKENS
from bench.peers.targets import TARGETS

_INTRODUCTION = """\
# Beside other servers

Made by `python -m tools.reference_docs` from `bench/results/peers_*.json`.
[Compare with other servers](../how-to/compare-with-peers.md) says how these are measured: the same weights in bfloat16,
the same prompts as token ids, the same number of threads, the same bounds on KV and on requests at once, on one machine
that is server and client, with one server asked at a time and the order turning from round to round. A ratio is that of
neighbouring runs in one round, so above 1 ours is better in every column; its median stands before the least and the
most. Nothing here was measured on a GPU.
"""

_NOTHING = "Nothing has been measured yet.\n"

_WORKLOADS: tuple[tuple[str, str], ...] = (
    (
        "documents",
        "## Documents larger than device memory\n\n"
        "16 documents of 2,048 tokens, 4 questions of 32 on each in random order, 4 at once, answers of 16 tokens;\n"
        "the device holds half of that. Cold: nobody has asked before. Host: other questions on the same documents,\n"
        "most of which have been pushed out of device memory into host memory. Disk: the same after device and host\n"
        "memory were emptied, and the kernel's cache of the files too.\n",
    ),
    (
        "burst",
        "## A burst on a new document\n\n8 at once ask about a document of 2,048, 1,024 or 512 tokens that nobody has\n"
        "seen. All of these compute it once, as the part that was cached shows: in Thermocline the others wait for\n"
        "the first, in vLLM they share its blocks from the same step on. So there is no repeated work to save, and\n"
        "what is left to win is how fast one document and eight questions are computed.\n",
    ),
    (
        "chat",
        "## Conversations\n\n16 conversations of 5 turns on average, 256 tokens of question and 32 of answer a turn,\n"
        "2 s of thought; together they do not fit the device.\n",
    ),
    (
        "fits",
        "## Everything fits\n\n4 documents of 2,048 tokens, 16 questions each, 4 at once: a tier below the device\n"
        "cannot help.\n",
    ),
    (
        "unshared",
        "## Nothing shared\n\nPrompts of 512 or 2,048 tokens that share nothing, answers of 65: one at a time, and\n"
        "eight. Prefill is prompt tokens over the client's time to first token, decode the later tokens over their\n"
        "time.\n",
    ),
)

_COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "unshared": (
        ("prefill_tokens_per_s", "prefill, tok/s"),
        ("decode_tokens_per_s", "decode, tok/s"),
        ("output_tokens_per_s", "output, tok/s"),
        ("ttft_p50_ms", "TTFT p50, ms"),
    ),
}
_USUAL_COLUMNS = (
    ("requests_per_s", "requests/s"),
    ("ttft_mean_ms", "TTFT mean, ms"),
    ("ttft_p50_ms", "p50"),
    ("first_ttft_mean_ms", "of first questions, mean"),
    ("repeat_ttft_mean_ms", "of repeats, mean"),
    ("token_p50_ms", "a token, ms"),
    ("cached_part", "cached, part of prompts"),
)


def columns(workload: str) -> tuple[tuple[str, str], ...]:
    """The figures that are shown of a workload, each with its heading."""
    return _COLUMNS.get(workload, _USUAL_COLUMNS)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents of all workloads that have been measured."""
    files = {workload: folder / f"peers_{workload}.json" for workload, _ in _WORKLOADS}
    return {workload: json.loads(file.read_text(encoding="utf-8")) for workload, file in files.items() if file.exists()}


def page(found: dict[str, dict[str, Any]], engine: dict[str, Any] | None = None) -> str:
    """The page, with a section for each workload that is there. ``engine`` is what ``bench.engine_speed`` found of the
    generated model in the same type.
    """
    parts = [_INTRODUCTION, *_verdicts(found)]
    for workload, introduction in _WORKLOADS:
        if workload in found:
            parts.append(introduction)
            for key, run in sorted(found[workload]["runs"].items()):
                parts += [f"### {key}\n", *_run(workload, run["results"]), _origin(run), ""]
                if workload == "burst" and engine is not None:
                    parts += _burst_limit(run["results"], engine)
    return "\n".join(parts if found else [_INTRODUCTION, _NOTHING])


def _burst_limit(results: dict[str, Any], engine: dict[str, Any]) -> list[str]:
    """What computing a document once takes at the least, beside what a target asks for."""
    if results["model"] != GENERATED or "linear_flops_per_token" not in engine:
        return []
    rate = max(rate for product in engine["limits"]["gflop_per_s"].values() for rate in list(product.values())[1:])
    rows = []
    for target in results["targets"]:
        passed = next(each.passed for each in TARGETS["burst"] if each.says == target["says"])
        length = BURST_TOKENS[passed]
        theirs, ours = (
            results["systems"][target[who]]["passes"][passed]["median"]["ttft_mean_ms"] for who in ("peer", "ours")
        )
        least = length * engine["linear_flops_per_token"] / rate / 1e6
        rows.append(f"| {length:,} | {theirs:,.0f} | {theirs / target['target']:,.0f} | {ours:,.0f} | {least:,.0f} |")
    return [
        f"What a target asks for, beside the linear layers of the document alone at {rate:,.0f} GFLOP/s, the most that "
        "either oneDNN",
        "or the fused kernels reach on this machine ([speed](speed.md)): no attention, no question, no other process. "
        "Where the",
        "last column is above the third, a server that computes these layers misses the target however it is built.",
        "",
        "| document, tokens | TTFT of the peer, mean, ms | a third of it | ours | linear layers at the limit |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def _origin(run: dict[str, Any]) -> str:
    hardware = run["hardware"]
    return (
        f"`{run['command']}`, commit {run['commit']}, {run['date']}, {hardware['processor']}, "
        f"{hardware['cores']} cores, {hardware['memory_gib']} GiB\n"
    )


def _verdicts(found: dict[str, dict[str, Any]]) -> list[str]:
    """Every target of every run, met or not."""
    rows = [
        f"| {workload} | {run['results']['model']} | {row['says']} "
        f"| {_title(run, row['ours'])} | {_title(run, row['peer'])} "
        f"| {_ratio(row['ratio'], *row['ratio_min_max'])} | ≥ {row['target']:g} | {_verdict(row)} |"
        for workload, _ in _WORKLOADS
        for run in found.get(workload, {"runs": {}})["runs"].values()
        for row in run["results"]["targets"]
    ]
    if not rows:
        return []
    met = sum(row.endswith("| met |") for row in rows)
    return [
        f"## Targets: {met} of {len(rows)} met\n",
        "| workload | model | what | ours | against | times better | target | |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _title(run: dict[str, Any], system: str) -> str:
    """A system's name as a reader knows it."""
    name: str = run["results"]["systems"][system]["title"]
    return name


def _verdict(row: dict[str, Any]) -> str:
    return "met" if row["is_met"] else "**not met**"


def _ratio(median: float, least: float, most: float) -> str:
    return f"{median:.2f} ({least:.2f} to {most:.2f})"


def _run(workload: str, results: dict[str, Any]) -> list[str]:
    """Medians of every system by pass, ratios to every peer, and how far greedy answers are the same."""
    parts = []
    passes = dict.fromkeys(name for system in results["systems"].values() for name in system["passes"])
    for passed in passes:
        rows = [
            (system["title"], system["passes"][passed]["median"])
            for system in results["systems"].values()
            if passed in system["passes"]
        ]
        shown = [(name, heading) for name, heading in columns(workload) if any(name in median for _, median in rows)]
        parts += [f"| {passed} | {' | '.join(heading for _, heading in shown)} |", "|---" * (len(shown) + 1) + "|"]
        for system_title, median in rows:
            cells = [_number(median[name]) if name in median else "" for name, _ in shown]
            parts.append(f"| {system_title} | {' | '.join(cells)} |")
        for pair, ratios in results["ratios"].items():
            if passed in ratios:
                cells = [_ratio(*ratios[passed][name].values()) if name in ratios[passed] else "" for name, _ in shown]
                parts.append(f"| *{_pair(pair, results)}* | {' | '.join(cells)} |")
        parts.append("")
    equal = [
        f"{_pair(pair, results)}, {passed}: {found['equal']:.0%} of answers whole, "
        f"{found['leading']:.0%} of tokens up to the first that differs"
        for pair, passes_found in results["greedy_answers_equal"].items()
        for passed, found in passes_found.items()
    ]
    if equal:
        parts += [f"Greedy answers that are the same (for information): {'; '.join(equal)}.", ""]
    return parts


def _pair(pair: str, results: dict[str, Any]) -> str:
    ours, _, peer = pair.partition(" to ")
    return f"{results['systems'][ours]['title']} to {results['systems'][peer]['title']}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
