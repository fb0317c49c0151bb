"""IMPRESS's Figures 3, 16 to 18, 20, 21 and 23 to 25, and HyperInfer's prefetching, on modelled hardware.

One A100 of 80 GB behind PCIe 4.0, an SSD of 5 GB/s, 10 GB on the device and 32 GB of host memory for prefixes (6.1).
Requests come one after the other; which prefix one asks for follows a normal distribution, and the first half warms
the caches. Which tokens matter is drawn (:mod:`bench.papers.impress_tokens`): the papers publish no attention, and it
decides how many chunks have nothing of importance. So everything is simulated for importance that comes in passages,
and RTE also for importance that does not. What probe heads answer is an input, not a result.

``python -m bench.papers.impress [--requests N] [--seed N] [--json]``; the whole run writes
``bench/results/papers_impress.json``, takes some minutes, and ``python -m tools.reference_docs`` then makes the pages.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from bench import results_file
from bench.papers.impress_systems import DISK_GB_S, GB, SYSTEMS, Machine, Prefixes, Served, System
from bench.papers.impress_tokens import CLUSTERED, SCATTERED, Spreads, in_chunks
from thermocline.simulate.cost import costs_of, step_s
from thermocline.simulate.profiles import load_hardware, load_model

HARDWARE = "a100-pcie4"
CHUNK_TOKENS = 64  # 6.1
REQUESTS = 120
QUERY_TOKENS = 50
"""Of a few-shot question. The paper gives no length; 750 is its average of real ones (2.2)."""

LONG_QUERY_TOKENS = 750
DATASET_GB = {"PIQA": 55.0, "RTE": 57.0, "COPA": 64.0, "OpenBookQA": 65.0}  # 6.1
RATIOS = {"PIQA": 0.25, "RTE": 0.25, "COPA": 0.5, "OpenBookQA": 0.25}  # 6.2
PREFIX_TOKENS = {"opt-6.7b": 5_200, "opt-13b": 5_200, "opt-30b": 3_600, "llama-2-7b": 5_200, "llama-2-13b": 5_200}
"""On average: 4.8 to 5.7 thousand, and at most 4 thousand with OPT-30B (6.1)."""

MOST_TOKENS = {"opt-30b": 4_000}
MOST = 10_000  # 6.1
OPT, LLAMA = ("opt-6.7b", "opt-13b", "opt-30b"), ("llama-2-7b", "llama-2-13b")
BREAKDOWN_TOKENS = (128, 512, 1024, 2048, 4096, 8192)  # Figure 3
CHUNK_SIZES = (16, 32, 64, 128, 256)  # Figure 23
SIZES_GB = (65.0, 100.0, 200.0, 400.0)  # Figure 24
RECALLS = (0.0, 0.25, 0.5, 0.75, 0.9)
BEST, LEADING = "score", "h2o_lfu"


def machine_of(model: str) -> Machine:
    hardware, profile = load_hardware(HARDWARE), load_model(model)
    return Machine(
        costs=costs_of(hardware, profile, page_size=CHUNK_TOKENS),
        layers=profile.layers,
        heads=profile.kv_heads,
        key_bytes=profile.kv_token_bytes / profile.layers / 2,
        link_rate=hardware.link.bandwidth_gb_s * GB * hardware.link.peak_efficiency,
    )


def lengths_of(model: str, dataset_gb: float, rng: np.random.Generator) -> list[int]:
    """Prefixes that fill a dataset's bytes, in whole chunks."""
    token_bytes = load_model(model).kv_token_bytes
    most, found, filled = MOST_TOKENS.get(model, MOST), [], 0.0
    while filled < dataset_gb * GB:
        drawn = min(most, round(PREFIX_TOKENS[model] * float(rng.lognormal(0.0, 0.2))))
        tokens = max(256, drawn // 256 * 256)
        found.append(tokens)
        filled += tokens * token_bytes
    return found


def asked_for(prefixes: int, requests: int, rng: np.random.Generator) -> list[int]:
    """Prefixes by a normal distribution over them (6.1)."""
    drawn = np.rint(rng.normal((prefixes - 1) / 2, prefixes / 5, requests))
    return [int(each) for each in np.clip(drawn, 0, prefixes - 1)]


def simulate(
    model: str,
    dataset_gb: float,
    ratio: float,
    systems: dict[str, System],
    *,
    requests: int,
    seed: int,
    spreads: Spreads = CLUSTERED,
    chunk_tokens: int = CHUNK_TOKENS,
    query: int = QUERY_TOKENS,
) -> dict[str, dict[str, float]]:
    """Every system over the same prefixes and requests, and recomputing."""
    rng = np.random.default_rng(seed)
    lengths = lengths_of(model, dataset_gb, rng)
    prefixes = Prefixes.drawn(lengths, spreads, rng)
    order = asked_for(len(lengths), requests, rng)
    machine = machine_of(model)
    found = {"recompute": _recomputed(machine, [lengths[each] for each in order[requests // 2 :]], query)}
    for name, system in systems.items():
        served, choices = Served(system, machine, prefixes, ratio, chunk_tokens, query), np.random.default_rng(seed + 1)
        for at, number in enumerate(order):
            served.ask(number, choices, counts=at >= requests // 2)
        counted = served.counted
        found[name] = {
            "ttft_ms": counted.mean_s * 1e3,
            "ttft_p99_ms": counted.p99_s * 1e3,
            "waited_ms": counted.waited_s / len(counted.ttft_s) * 1e3,
            "io_ms": counted.way_s / len(counted.ttft_s) * 1e3,
            "device_hits": counted.chunks_on_device / counted.chunks,
            "chunks": counted.chunks / len(counted.ttft_s),
            "disk_gb": counted.disk_bytes / len(counted.ttft_s) / GB,
        }
    return found


def _recomputed(machine: Machine, lengths: list[int], query: int) -> dict[str, float]:
    seconds = [step_s(machine.costs, [(0, tokens + query)], 0, 0) for tokens in lengths]
    return {"ttft_ms": float(np.mean(seconds)) * 1e3, "ttft_p99_ms": float(np.quantile(seconds, 0.99)) * 1e3}


def breakdown() -> list[dict[str, Any]]:
    """Figure 3: a prefix that is recomputed, or loaded from each tier, layer by layer beside the computation."""
    rows = []
    for model in OPT:
        machine = machine_of(model)
        for tokens in BREAKDOWN_TOKENS:
            computing = step_s(machine.costs, [(tokens, tokens + QUERY_TOKENS)], 0, 0)
            nbytes = tokens * machine.key_bytes * 2 * machine.layers
            row: dict[str, Any] = {"model": model, "tokens": tokens}
            row["recompute"] = step_s(machine.costs, [(0, tokens + QUERY_TOKENS)], 0, 0) * 1e3
            for tier, rate in (("host", machine.link_rate), ("disk", DISK_GB_S * GB)):
                loading = nbytes / rate
                layer = computing / machine.layers
                ttft = max(loading / machine.layers + computing, loading + layer)
                row[tier], row[f"{tier}_waiting"] = ttft * 1e3, 1 - computing / ttft
            row["device"] = computing * 1e3
            rows.append(row)
    return rows


def importance_in_chunks(seed: int) -> dict[str, dict[str, float]]:
    """Figure 5 (a) and 20 for the drawn importance: what it takes for granted, for whoever judges the rest."""
    found = {}
    for name, spreads in (("clustered", CLUSTERED), ("scattered", SCATTERED)):
        rng = np.random.default_rng(seed)
        prefixes = Prefixes.drawn([5_120] * 8, spreads, rng)
        for ratio in (0.25, 0.5):
            read, packed, share = [], [], []
            for layers in prefixes.layers:
                for tokens in layers:
                    chosen = tokens.chosen(ratio, rng)
                    plain = in_chunks(chosen, tokens.tokens, CHUNK_TOKENS)
                    read.append(np.count_nonzero(plain) / len(plain))
                    share.append(float(plain[plain > 0].mean()))
                    after = in_chunks(chosen, tokens.tokens, CHUNK_TOKENS, tokens.order)
                    packed.append(np.count_nonzero(after) / len(after))
            found[f"{name}, {ratio:.0%}"] = {
                "important_in_read": float(np.mean(share)),
                "chunks_read": float(np.mean(read)),
                "chunks_read_reordered": float(np.mean(packed)),
            }
    return found


def speculation(requests: int, seed: int) -> list[dict[str, Any]]:
    """HyperInfer IV-C: IMPRESS, and guesses of the next layer of which more and more are right."""
    rows = []
    for model in OPT:
        for query in (QUERY_TOKENS, LONG_QUERY_TOKENS):
            systems = {BEST: SYSTEMS[BEST]}
            systems |= {f"{recall:g}": replace(SYSTEMS[BEST], recall=recall) for recall in RECALLS}
            found = simulate(
                model, DATASET_GB["RTE"], RATIOS["RTE"], systems, requests=requests, seed=seed, query=query
            )
            rows.append({"model": model, "query": query, "ttft_ms": {name: found[name]["ttft_ms"] for name in systems}})
            say(f"speculation, {model}, {query}", found)
    return rows


def say(title: str, found: dict[str, dict[str, float]]) -> None:
    """One line of progress."""
    shown = ", ".join(f"{name} {row['ttft_ms']:.0f}" for name, row in found.items())
    print(f"{title:28} TTFT in ms: {shown}", file=sys.stderr, flush=True)


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="fewer make a shorter run, written nowhere")
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    if options.requests < 2:
        print("impress: --requests must be at least 2", file=sys.stderr)
        raise SystemExit(2)
    results = simulated(options.requests, options.seed)
    if options.json or options.requests != REQUESTS:
        print(json.dumps(results, indent=2))
        return
    print(results_file.write("papers_impress", results, seed=options.seed))


def simulated(requests: int, seed: int) -> dict[str, Any]:
    """Everything."""
    main_figure: dict[str, dict[str, Any]] = {}
    for name, spreads in (("clustered", CLUSTERED), ("scattered", SCATTERED)):
        main_figure[name] = {}
        for model in OPT:
            main_figure[name][model] = {}
            for dataset in DATASET_GB if spreads == CLUSTERED else ("RTE",):
                found = simulate(
                    model, DATASET_GB[dataset], RATIOS[dataset], SYSTEMS, requests=requests, seed=seed, spreads=spreads
                )
                main_figure[name][model][dataset] = found
                say(f"{name}, {model}, {dataset}", found)
    both = {name: SYSTEMS[name] for name in ("everything", LEADING, BEST)}
    by_chunk = {
        str(size): simulate("opt-6.7b", 57.0, 0.25, both, requests=requests, seed=seed, chunk_tokens=size)
        for size in CHUNK_SIZES
    }
    by_size = {f"{size:g}": simulate("opt-6.7b", size, 0.25, both, requests=requests, seed=seed) for size in SIZES_GB}
    llama = {
        model: {
            dataset: simulate(model, DATASET_GB[dataset], RATIOS[dataset], both, requests=requests, seed=seed)
            for dataset in ("PIQA", "COPA")
        }
        for model in LLAMA
    }
    return {
        "simulated": True,
        "hardware": HARDWARE,
        "requests": requests,
        "query_tokens": QUERY_TOKENS,
        "breakdown": breakdown(),
        "importance_in_chunks": importance_in_chunks(seed),
        "main": main_figure,
        "by_chunk_tokens": by_chunk,
        "by_dataset_gb": by_size,
        "llama": llama,
        "speculation": speculation(requests, seed),
    }


if __name__ == "__main__":
    main()
