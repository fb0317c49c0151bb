"""Where does reading a part of a prefix pay: models, lengths, disks, shares of the tokens and techniques (IMPRESS 6).

    python -m bench.importance_grid --models deep-mha=DIR,deep-gqa=DIR [--tokens 1024,4000]
    [--mb-per-s 20,200,1000,7000] [--ratios 0.1,0.25,0.5] [--systems NAME,...] [--questions 10] [--add FILE]
    [--name NAME] [--save]

Whole cells over HTTP, each with its disk behind a token bucket. Every document is computed and saved once; before each
question the device and host memory are emptied, so that the disk holds the prefix and nothing else does. The same
questions go to every system:

``recompute`` reads nothing; ``everything`` loads all KV; ``hidden`` restores KV from hidden states (HCache); these are
exact. ``important`` reads in part, a request for each ratio. ``h2o`` chooses by the keys of all heads, ``chunks`` reads
blocks of 64 tokens (IMPRESS's), ``on_demand`` prefetches no keys: each is ``important`` without one technique.
``default`` is a cell as it comes, which keeps KV or hidden states and computes, loads or restores. ``planned`` is a
cell with sparse copies (``--sparse true``), for which it keeps KV: asked exactly and with each ratio, it computes,
loads all KV or reads in part.

Figures are medians over questions; ratios are of the same questions, with a 95% interval by resampling them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from bench import results_file
from bench.emptying import empty, rest
from bench.importance_prompts import Prefix, prefixes, weights_sha256
from bench.importance_serving import ask, cell_on_disk, counters, kv_bytes_of
from bench.importance_similarity import folder_of
from bench.resampling import median_interval
from shared.bus.nats_bus import connect
from thermocline.client import served_model

EXACT = ("recompute", "everything", "hidden")
ALLOWED = {"default": EXACT, "planned": ("recompute", "everything")}
"""Exact ways among which these cells choose."""

_IN_PART = {"RESTORING": "important"}
SYSTEMS: dict[str, dict[str, str]] = {
    "recompute": {"RESTORING": "recompute"},
    "everything": {"RESTORING": "kv", "HIDDEN_FORM": "off"},
    "hidden": {"RESTORING": "hidden", "SPARSE": "false"},
    "important": _IN_PART,
    "on_demand": _IN_PART | {"PREFETCH_KEYS": "false"},
    "chunks": _IN_PART | {"SPARSE_BLOCK_TOKENS": "64"},
    "h2o": _IN_PART | {"IMPORTANCE_ALPHA": "0", "IMPORTANCE_PROBE_HEADS": "3"},
    "default": {"SPARSE": "false"},
    "planned": {},
}
DOCUMENTS = 4
WARM = 3
"""Questions of each kind before those that are measured: a cell learns what ways cost from what it has served."""
TIERS = ("device", "host")
WHOLE, IN_PART = "bytes_fetched", "sparse_bytes_read"
"""Counters of a storage."""


def kinds_of(system: str, ratios: list[float]) -> list[float]:
    """Return the ratios that a system is asked with; 0 is exact."""
    if system in (*EXACT, "default"):
        return [0.0]
    return [0.0, *ratios] if system == "planned" else ratios


async def measure(
    base_url: str, nats: str, system: str, documents: list[Prefix], options: argparse.Namespace
) -> dict[float, list[dict[str, float]]]:
    """Return for each ratio what every question took: ``ttft_ms``, ``bytes``, ``right``, ``lossy``."""
    bus = await connect((nats,), "bench")
    found: dict[float, list[dict[str, float]]] = {ratio: [] for ratio in kinds_of(system, options.ratios)}
    async with httpx.AsyncClient(base_url=base_url, timeout=600, trust_env=False) as client:
        model = (await served_model(client))["id"]
        await rest(bus)
        for document in documents:
            await ask(client, model, document.tokens + document.questions[0][0], {})
            await rest(bus)
        for number in range(-WARM, options.questions):
            document = documents[number % len(documents)]
            question, expected = document.questions[(number // len(documents)) % len(document.questions)]
            for ratio, rows in found.items():
                await empty(bus, TIERS)
                before = await counters(bus)
                cache = {"fidelity": "importance", "ratio": ratio} if ratio else {}
                answer = await ask(client, model, document.tokens + question, cache)
                await rest(bus)
                after = await counters(bus)
                if number >= 0:
                    # Behind a lossy answer the storage may warm host memory, which no request waits for.
                    of_answer = IN_PART if answer.importance else WHOLE
                    rows.append(
                        {
                            "ttft_ms": answer.ttft_s * 1e3,
                            "bytes": after[of_answer] - before[of_answer],
                            "right": float(answer.text.strip().startswith(expected)),
                            "lossy": float(bool(answer.importance)),
                        }
                    )
    await bus.close()
    return found


def bench_cell(
    model: Path, folder: Path, system: str, mb_per_s: float, documents: list[Prefix], options: argparse.Namespace
) -> dict[float, list[dict[str, float]]]:
    """Measure one system in a cell of its own."""
    kv_bytes = kv_bytes_of(model, documents)
    pools = kv_bytes + options.own_bytes, 2 * kv_bytes
    with cell_on_disk(model, folder, mb_per_s, pools, SYSTEMS[system], options.probe_heads) as cell:
        return asyncio.run(measure(cell.base_url, cell.nats_url, system, documents, options))


def row_of(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of one series, and every TTFT in order of the questions."""
    return {
        "ttft_ms": round(statistics.median(row["ttft_ms"] for row in rows), 1),
        "mb": round(statistics.mean(row["bytes"] for row in rows) / 1e6, 3),
        "right": round(statistics.mean(row["right"] for row in rows), 3),
        "lossy": round(statistics.mean(row["lossy"] for row in rows), 3),
        "all_ttft_ms": [round(row["ttft_ms"], 1) for row in rows],
    }


def compared(slower: list[float], faster: list[float], seed: int) -> dict[str, Any]:
    """Return the median of the ratios of paired TTFTs, and its 95% interval."""
    ratios = [above / below for above, below in zip(slower, faster, strict=True)]
    low, high = median_interval(ratios, seed)
    return {"ratio": round(statistics.median(ratios), 3), "low": round(low, 3), "high": round(high, 3)}


def best_of(series: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the series with the least TTFT."""
    return min(series, key=lambda one: float(one["ttft_ms"]))


def compare_setting(series: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return for each ratio of one model, length and disk how the ways compare; 0 is what exact requests get.

    ``in_part`` is the best exact way over ``important``; ``default`` and ``planned`` are the best single way that the
    cell can take for such a request over what it took; techniques are without over with.
    """
    exact = [one for one in series if one["system"] in EXACT]
    found = []
    for ratio in sorted({one["ratio"] for one in series}):
        named = {one["system"]: one for one in series if one["ratio"] == ratio}
        important, best = named.get("important"), best_of(exact)
        row: dict[str, Any] = {"ratio": ratio, "best_exact": best["system"]}
        if important is not None:
            row["in_part"] = compared(best["all_ttft_ms"], important["all_ttft_ms"], seed)
            read = [one["mb"] for one in exact if one["mb"]]
            row["bytes"] = round(min(read) / important["mb"], 2) if read and important["mb"] else None
            for technique in ("on_demand", "chunks", "h2o"):
                if technique in named:
                    row[technique] = compared(named[technique]["all_ttft_ms"], important["all_ttft_ms"], seed)
        for system, ways in ALLOWED.items():
            if system in named:
                own = [one for one in exact if one["system"] in ways]
                allowed = best_of(own if important is None else [*own, important])
                row[f"best_for_{system}"] = allowed["system"]
                row[system] = compared(allowed["all_ttft_ms"], named[system]["all_ttft_ms"], seed)
        found.append(row)
    return found


def parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--models", default="mha,gqa", help="names of bundled models, or NAME=DIR")
    parser.add_argument("--tokens", type=numbers, default=[1024.0, 4000.0], help="of each document")
    parser.add_argument("--mb-per-s", type=numbers, default=[20.0, 200.0, 1000.0, 7000.0])
    parser.add_argument("--ratios", type=numbers, default=[0.1, 0.25, 0.5])
    parser.add_argument("--systems", default="recompute,everything,hidden,important,default,planned")
    parser.add_argument("--probe-heads", type=int, default=1)
    parser.add_argument("--questions", type=int, default=10, help="of each ratio in each cell")
    parser.add_argument("--own-bytes", type=int, default=8 * 2**20, help="device memory for requests' own tokens")
    parser.add_argument("--add", type=Path, help="results of an earlier run, whose other series are kept")
    parser.add_argument("--name", default="importance_grid", help="of the file in bench/results")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    models = dict(map(folder_of, options.models.split(",")))
    earlier = json.loads(options.add.read_text(encoding="utf-8"))["results"] if options.add else {"series": []}
    series: list[dict[str, Any]] = earlier["series"]
    weights: dict[str, str] = earlier.get("weights_sha256", {})
    for name, folder in models.items():
        weights[name] = weights_sha256(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for tokens in map(int, options.tokens):
            documents = prefixes("documents", DOCUMENTS, tokens, 6, tokenizer, options.seed)
            for mb_per_s in options.mb_per_s:
                for system in options.systems.split(","):
                    began, place = time.monotonic(), {"model": name, "tokens": tokens, "mb_per_s": mb_per_s}
                    with tempfile.TemporaryDirectory() as scratch:
                        found = bench_cell(folder, Path(scratch), system, mb_per_s, documents, options)
                    for ratio, rows in found.items():
                        key = {**place, "system": system, "ratio": ratio}
                        series = [one for one in series if {field: one[field] for field in key} != key]
                        series.append(key | row_of(rows))
                        shown = {figure: value for figure, value in series[-1].items() if figure != "all_ttft_ms"}
                        print(json.dumps(shown), f"({time.monotonic() - began:.0f} s)", flush=True)
                if options.save:
                    results = {
                        "questions": options.questions,
                        "documents": DOCUMENTS,
                        "probe_heads": options.probe_heads,
                        "weights_sha256": weights,
                        "series": series,
                        "compared": compare_all(series, options.seed),
                    }
                    results_file.write(options.name, results, seed=options.seed)


def compare_all(series: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the comparisons of every setting that has an exact way."""
    places = sorted({(one["model"], one["tokens"], one["mb_per_s"]) for one in series})
    found = []
    for model, tokens, mb_per_s in places:
        own = [one for one in series if (one["model"], one["tokens"], one["mb_per_s"]) == (model, tokens, mb_per_s)]
        if any(one["system"] in EXACT for one in own):
            place = {"model": model, "tokens": tokens, "mb_per_s": mb_per_s}
            found += [place | row for row in compare_setting(own, seed)]
    return found


if __name__ == "__main__":
    main()
