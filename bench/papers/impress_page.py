"""``docs/results/impress.md`` from committed results: nothing on the page is written by hand but the reasons."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.papers.claims import made_by, percent, ratio, table, times
from bench.papers.figures import Documents, every_figure
from bench.papers.impress_figures import BEST, LEADING, PAPER, STEPS, entries, steps_of, thresholds
from thermocline.simulate.profiles import load_model

Part = dict[str, Any]

SYSTEMS = ("recompute", "everything", "h2o_lru", "h2o_lfu", "identification", "reordering", "score")
_MODELS = {"mha": "thermocline-mha", "gqa": "thermocline-gqa"}


def render(documents: Documents) -> str:
    """The whole page."""
    modelled, counted = documents["papers_impress"], documents["papers_impress_measured"]
    results = modelled["results"]
    lines = [
        f"# {PAPER.title}",
        "",
        "What is loaded of a prefix if only important tokens are. **Measured** on the bundled models, whose attention "
        "and answers are real: below, and on the pages of [importance](importance.md), [quality](quality.md) and "
        "[serving](importance-serving.md). **Simulated** for the paper's models and hardware by a model of the disk's "
        "path. The papers' datasets and their attention are not published, so which tokens matter is drawn there; how "
        "is an assumption (`bench/papers/impress_tokens.py`).",
        "",
        *every_figure(PAPER, entries(documents)),
        "## Simulated: setting",
        "",
        made_by(modelled)
        + f" `{results['hardware']}`, an SSD of 5 GB/s, 10 GB on the device and 32 GB of host memory for prefixes "
        f"(6.1); {results['requests']} requests one after the other, half of them to warm caches, questions of "
        f"{results['query_tokens']} tokens, prefixes asked for by a normal distribution, 25% kept (COPA: 50%). Probe "
        "heads disagree in a fifth of the layers, which is an input: the paper says fewer (4.3).",
        "",
        *_assumed(results["importance_in_chunks"]),
        *_breakdown(results["breakdown"]),
        *_main(results),
        *_steps(results["main"]),
        *_by(results["by_chunk_tokens"], "Figure 23: chunk sizes", "chunk, tokens",
             "OPT-6.7B on 57 GB. TTFT of AS+H2O+LFU over IMPRESS's; the paper says 2.2 to 2.4× at all sizes."),
        *_by(results["by_dataset_gb"], "Figure 24: dataset sizes", "dataset, GB",
             "OPT-6.7B. The paper says 1.2 to 2.0×."),
        "## Measured: tokens, chunks, thresholds",
        "",
        made_by(counted, verb="measured"),
        "",
        *_chunks(counted["results"]),
        *_thresholds(counted["results"]),
        *_what_differs(results),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _assumed(found: dict[str, Part]) -> list[str]:
    rows = [
        [name, *(percent(part[key]) for key in ("important_in_read", "chunks_read", "chunks_read_reordered"))]
        for name, part in found.items()
    ]
    return [
        "What the drawn importance means for chunks of 64 tokens. *Clustered* is used below: what matters lies in "
        "passages; *scattered* is the worst case. In the paper 46% of what is read is important when half of the "
        "tokens are (Figure 5), and repacking spares a sixth of the chunks (Figure 20):",
        "",
        *table(["importance", "important in what is read", "chunks read", "when repacked"], rows),
        "",
    ]


def _breakdown(rows: list[Part]) -> list[str]:
    cells = [
        [
            row["model"],
            row["tokens"],
            *(f"{row[name]:.0f}" for name in ("recompute", "device", "host", "disk")),
            percent(row["host_waiting"]),
            percent(row["disk_waiting"]),
        ]
        for row in rows
    ]
    head = ["model", "prefix", "recompute, ms", "device", "host", "disk", "host: waiting", "disk: waiting"]
    return [
        "## Figure 3: a prefix from each tier",
        "",
        "All of its KV, layer by layer beside the computation of the question.",
        "",
        *table(head, cells),
        "",
    ]


def _main(results: Part) -> list[str]:
    lines = []
    for importance, models in results["main"].items():
        for model, datasets in models.items():
            lines += [_line(importance, model, dataset, found) for dataset, found in datasets.items()]
    for model, datasets in results["llama"].items():
        lines += [_line("clustered", model, dataset, found) for dataset, found in datasets.items()]
    loads = []
    for model, datasets in results["main"]["clustered"].items():
        for dataset, found in datasets.items():
            for name in SYSTEMS[1:]:
                row = found[name]
                loads.append(
                    [
                        model,
                        dataset,
                        name,
                        row["ttft_ms"],
                        row["ttft_p99_ms"],
                        row["io_ms"],
                        percent(row["device_hits"]),
                        row["disk_gb"],
                    ]
                )
    over = [f"{name} / {BEST}" for name in ("everything", LEADING)]
    head = ["model", "dataset", "system", "mean TTFT, ms", "p99", "loading, ms", "device hits", "GB from disk"]
    return [
        "## Figures 16, 17, 21 and 25: TTFT, loading, hits",
        "",
        "Mean TTFT in ms. *everything* is AS-like, *h2o_lru* and *h2o_lfu* are AS+H2O; the others add to one another, "
        f"and *{BEST}* is IMPRESS. Datasets whose bytes make equally many prefixes, as PIQA's and RTE's with OPT-30B, "
        "are one and the same run where they keep as much:",
        "",
        *table(["importance", "model", "dataset", *SYSTEMS, *over], lines),
        "",
        "p99, the time that a request's loads take, chunks that were found on the device, and bytes from the disk for "
        "each request:",
        "",
        *table(head, loads),
        "",
    ]


def _line(importance: str, model: str, dataset: str, found: dict[str, Part]) -> list[object]:
    shown = [f"{found[name]['ttft_ms']:.0f}" if name in found else "" for name in SYSTEMS]
    over = [times(ratio(found[name]["ttft_ms"], found[BEST]["ttft_ms"])) for name in ("everything", LEADING)]
    return [importance, model, dataset, *shown, *over]


def _steps(main: Part) -> list[str]:
    lines = []
    for model, datasets in main["clustered"].items():
        for dataset, found in datasets.items():
            steps = steps_of([found], "ttft_ms")
            lines.append([model, dataset, *(times(steps[step][0]) for step in STEPS)])
    disk, device = _score_changes(main)
    return [
        "## Figure 18: each technique",
        "",
        "TTFT of the step before over that with it:",
        "",
        *table(["model", "dataset", *STEPS], lines),
        "",
        f"With the score device hits change by {device:+.1f} points on average, and bytes from the disk by "
        f"{disk:+.0%}. A score of uses times importance counts what a chunk saves the link, over which only important "
        "rows go. What it saves the disk is the whole chunk, however little of it is wanted: there LFU is the better "
        "guess. Thermocline weighs what losing a page costs, with importance as one factor of it "
        "([ADR 0017](../../infra/adr/0017-importance-is-one-factor-of-one-value.md)).",
        "",
    ]


def _score_changes(main: Part) -> tuple[float, float]:
    """Of bytes from the disk, relative, and of device hits, in points; from reordering to score."""
    rows = [found for datasets in main["clustered"].values() for found in datasets.values()]
    disk = statistics.mean(found[BEST]["disk_gb"] for found in rows)
    before = statistics.mean(found["reordering"]["disk_gb"] for found in rows)
    device = statistics.mean(found[BEST]["device_hits"] - found["reordering"]["device_hits"] for found in rows)
    return disk / before - 1, 100 * device


def _by(rows: dict[str, dict[str, Part]], title: str, column: str, text: str) -> list[str]:
    lines = [
        [
            name,
            *(f"{found[system]['ttft_ms']:.0f}" for system in ("recompute", "everything", LEADING, BEST)),
            times(ratio(found[LEADING]["ttft_ms"], found[BEST]["ttft_ms"])),
        ]
        for name, found in rows.items()
    ]
    head = [column, "recompute, ms", "everything", LEADING, BEST, f"{LEADING} / {BEST}"]
    return [f"## {title}", "", text, "", *table(head, lines), ""]


def _chunks(counted: dict[str, Part]) -> list[str]:
    lines: list[Sequence[object]] = []
    for model, part in counted.items():
        static = {
            (row["metric"], row["ratio"]): row["static_recall"] for row in part["chunks"] if not row["chunk_tokens"]
        }
        for row in part["chunks"]:
            if row["chunk_tokens"]:
                correlation = row.get("hot_is_important")
                lines.append(
                    [
                        model,
                        row["metric"],
                        f"{row['ratio']:.0%}",
                        percent(static[row["metric"], row["ratio"]]),
                        row["chunk_tokens"],
                        percent(row["important_in_read"]),
                        percent(row["chunks_read"]),
                        percent(row["chunks_read_reordered"]),
                        "-" if correlation is None else f"{correlation:.2f}",
                    ]
                )
    first = next(iter(counted.values()))
    head = ["model", "metric", "kept", "recall of what others want", "chunk", "important in what is read"]
    return [
        "### Figures 4, 5 and 20: tokens and chunks",
        "",
        f"{' and '.join(_MODELS[name] for name in counted)}, {first['questions']} questions about documents of "
        f"{first['prefix_tokens']:,} tokens. What other questions on the same document want, on average, is what could "
        "be known before: as a static choice (recall; what it costs in answers is `static` on the page of "
        "[quality](quality.md#methods-at-equal-retention)), and as the order in which a prefix is repacked. The last "
        "column is the correlation, over chunks, of how many questions read one with how much of it they want.",
        "",
        *table([*head, "chunks read", "repacked", "hot is important"], lines),
        "",
    ]


def _thresholds(counted: dict[str, Part]) -> list[str]:
    lines = []
    for metric in ("h2o", "last_pooled"):
        for model, rows in thresholds(counted, metric).items():
            lines += [
                [
                    model,
                    metric,
                    f"{row['alpha']:g}",
                    percent(row["fallback"]),
                    percent(row["keys"]),
                    percent(row["read"]),
                    percent(row["exact"]),
                    ", ".join(percent(each) for each in row["layers"]),
                ]
                for row in rows
            ]
    full = ", ".join(f"{percent(part['exact_full'])} of {name}'s" for name, part in counted.items())
    head = ["model", "metric", "alpha", "layers that fall back", "of all keys", "of all KV", "right", "KV by layer"]
    return [
        "### Figures 11, 19 and 22: thresholds",
        "",
        "Three probe heads, 25% kept, real loads. Alpha 0 is a threshold of 1, which no layer passes; the paper's is "
        f"0.6. With all KV {full} answers are right.",
        "",
        *table(head, lines),
        "",
    ]


def _what_differs(results: Part) -> list[str]:
    largest = load_model("opt-30b")
    gigabytes = 4_000 * largest.kv_token_bytes / 1e9
    found = results["main"]["clustered"]["opt-30b"]["RTE"]
    tail = found["everything"]["ttft_p99_ms"] / 1e3
    return [
        "## What differs from the paper, and why",
        "",
        f"- **Absolute times.** On RTE with OPT-30B the paper's AS-like has a p99 of 9.3 s (6.2), here {tail:.1f} s. A "
        f"prefix has at most 4,000 tokens, {gigabytes:.1f} GB, which 5 GB/s read in {gigabytes / 5:.1f} s. So it "
        "batched requests, or its reads reached a part of that; it does not say. The further reads are from the disk's "
        "speed, the more every byte that is spared is worth, and the larger are its ratios.",
        "- **Recomputing** takes what the profile's efficiency says, which FlexGen, that the paper extends, need not "
        "reach.",
        "- **Which tokens matter** is drawn in the simulation, and real on the small models. Nothing that is said of "
        "answers is simulated.",
        "- **The score** often costs more than it brings, and identification brings nothing where half is kept: see "
        "Figure 18.",
    ]
