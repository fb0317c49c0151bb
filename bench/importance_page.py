"""``docs/results/importance.md`` and its chart from the committed results: only reasons are written by hand."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import results_file
from bench.line_chart import line_chart
from bench.papers.claims import percent, table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "importance.md"
CHART = PAGE.with_suffix(".svg")
RESULTS = results_file.RESULTS / "importance_similarity.json"
WORKLOADS = {"documents": "documents", "few_shot": "few-shot"}
RULES = {"paper": "the paper's threshold", "always_vote": "always the vote", "each_head": "always each head"}
RATIO = 0.25

Part = dict[str, Any]


def write() -> None:
    """Make both from ``bench/results/importance_similarity.json``. Raises FileNotFoundError where there is none."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(render(document), encoding="utf-8")
    CHART.write_text(chart(document), encoding="utf-8")


def render(document: Part) -> str:
    """The whole page."""
    results, hardware = document["results"], document["hardware"]
    lines = [
        "# Which tokens matter: similarity across heads and layers",
        "",
        "After IMPRESS (Figures 7, 8, 11 and 15) and HyperInfer (Figure 12), on the two bundled models, real forward "
        f"passes in float32. `{document['command']}`, seed {document['seed']}, commit {document['commit']}, "
        f"{document['date']}, on {hardware['processor']}. Nothing on this page is a time, so nothing depends on the "
        "machine. The papers' models have 32 to 96 heads a layer and 32 to 48 layers; these have "
        + ", and ".join(_shape(name, figures) for name, figures in results.items())
        + ", and were trained to find facts in documents. What is true of them need not be of others.",
        "",
        *_setting(results),
        *_similarity(results),
        *_probe_heads(results),
        *_metrics(results),
        *_rules(results),
        *_speculation(results),
        *_conclusions(results),
    ]
    return "\n".join(lines) + "\n"


def chart(document: Part) -> str:
    """Similarity by the share of tokens chosen, by the paper's metric, on documents."""
    lines: dict[str, list[float]] = {}
    ratios: list[float] = []
    for model, figures in document["results"].items():
        rows = [row for row in figures["documents"]["similarity"] if row["metric"] == "h2o"]
        ratios = sorted({row["ratio"] for row in rows})
        for name, key in (("heads", "heads"), ("adjacent layers", "adjacent")):
            lines[f"{name}, {model}"] = [_mean(rows, key, ratio=ratio) for ratio in ratios]
        lines["by chance"] = [_mean(rows, "chance", ratio=ratio) for ratio in ratios]
    return line_chart(
        "Similarity of sets of important tokens, documents, metric h2o",
        "tokens chosen, percent",
        "mean Jaccard index",
        [100 * ratio for ratio in ratios],
        lines,
        dashed=["by chance"],
    )


def _shape(name: str, figures: Part) -> str:
    heads = f"{figures['query_heads']} query and {figures['kv_heads']} KV heads in {figures['layers']} layers"
    return f"{heads} (`thermocline-{name}`)"


def _cells(results: Part) -> Iterator[tuple[str, str, Part]]:
    """(model, workload, figures), in order."""
    for model, figures in results.items():
        for workload in WORKLOADS:
            yield model, workload, figures[workload]


def _mean(rows: list[Part], key: str, **where: Any) -> float:
    return statistics.mean(row[key] for row in rows if key in row and all(row[k] == v for k, v in where.items()))


def _loading(part: Part, **where: Any) -> list[Part]:
    return [row for row in part["loading"] if all(row[key] == value for key, value in where.items())]


def _setting(results: Part) -> list[str]:
    rows = [
        (model, WORKLOADS[workload], part["prefix_tokens"], part["question_tokens"], part["questions"],
         part["exact_full"])
        for model, workload, part in _cells(results)
    ]  # fmt: skip
    head = ("model", "workload", "prefix, tokens", "question, tokens", "questions", "exact with all KV")
    return [*table(head, rows), ""]


def _similarity(results: Part) -> list[str]:
    head = ("model", "workload", "tokens chosen", "by chance", "threshold", "all", "by layer")
    rows, between = [], []
    for model, workload, part in _cells(results):
        similar = [row for row in part["similarity"] if row["metric"] == "h2o"]
        for ratio in sorted({row["ratio"] for row in similar}):
            at = [row for row in similar if row["ratio"] == ratio]
            chance = _mean(at, "chance")
            start = (model, WORKLOADS[workload], f"{ratio:.0%}", chance)
            rows.append((*start, chance**0.6, _mean(at, "heads"), _by_layer(at, "heads")))
            between.append((*start, _mean(at, "adjacent"), _by_layer(at, "adjacent")))
    return [
        "## Similarity across heads",
        "",
        "Mean Jaccard index over all pairs of KV heads, by column sums (`h2o`). IMPRESS reports 0.48 at 10% and 0.68 "
        "at 40% as averages over OPT-30B's layers, and above 0.95 for the middle layer of OPT-6.7B.",
        "",
        "![Similarity by share of tokens](importance.svg)",
        "",
        *table(head, rows),
        "",
        "## Similarity across adjacent layers",
        "",
        "Of the sets that all KV heads of a layer vote for, between a layer and the one before it.",
        "",
        *table((*head[:4], "all", "into layer 1, 2, 3"), between),
        "",
    ]


def _by_layer(rows: list[Part], key: str) -> str:
    return ", ".join(f"{row[key]:.2f}" for row in sorted(rows, key=lambda row: row["layer"]) if key in row)


def _probe_heads(results: Part) -> list[str]:
    probes, loaded = [], []
    for model, workload, part in _cells(results):
        if len({row["unit"] for row in part["loading"]}) == 1:
            continue
        start = (model, WORKLOADS[workload])
        for row in part["probes"]:
            probes.append((*start, row["metric"], f"{row['count']} × {row['unit']}", percent(row["probe_keys"]),
                           row["similarity"], percent(row["fallback"]), percent(row["mass"]),
                           row["like_everyone"]))  # fmt: skip
        for row in part["loading"]:
            if row["ratio"] == RATIO and row["metric"] in ("h2o", "last_pooled") and row["rule"] != "each_head":
                loaded.append((*start, row["metric"], row["unit"], RULES[row["rule"]], percent(row["fallback"]),
                               percent(row["probe_keys"]), percent(row["read"]), row["exact"]))  # fmt: skip
    finds = ("model", "workload", "metric", "probe heads", "keys read", "similarity", "layers that fall back",
             "attention that the vote gets", "like the vote of all")  # fmt: skip
    costs = ("model", "workload", "metric", "unit", "rule", "layers that fall back", "keys read", "all reads", "exact")
    return [
        "## What a probe head is under GQA",
        "",
        f"A KV head whose query heads vote together, or a query head, at {RATIO:.0%}. Keys and reads are shares of the "
        "prefix's KV bytes. The last columns of the first table compare the voted set with the attention that all "
        "heads pay to the prefix, and (Jaccard) with the set that all KV heads vote for.",
        "",
        *table(finds, probes),
        "",
        *_probe_verdict(results),
        "",
        "The same when it is loaded, with three probe heads:",
        "",
        *table(costs, loaded),
        "",
        "The model has three KV heads, so three of them as probe heads save no keys: a layer that falls back even "
        "reads *less* than one that accepts, because its keys are there and V alone is missing. Three query heads read "
        "the keys of two KV heads here, and of one alone where groups have three or more.",
        "",
    ]


def _probe_verdict(results: Part) -> list[str]:
    """What equal numbers of keys find, read either way."""
    pairs: dict[tuple[str, str], list[tuple[Part, Part]]] = {}
    for _, _, part in _cells(results):
        if len({row["unit"] for row in part["loading"]}) == 1:
            continue
        at = {(row["metric"], row["unit"], row["count"]): row for row in part["probes"]}
        for metric in ("h2o", "last_pooled"):
            for kv, single in ((2, 3), (1, 2)):
                pair = at[metric, "kv_head", kv], at[metric, "query_head", single]
                pairs.setdefault((str(kv), str(single)), []).append(pair)
    lines = []
    for (kv, single), found in pairs.items():
        by_kv, by_query = (statistics.mean(pair[side]["mass"] for pair in found) for side in (0, 1))
        wins = sum(pair[0]["mass"] >= pair[1]["mass"] for pair in found)
        alike = statistics.mean(pair[1]["similarity"] for pair in found)
        lines.append(
            f"- For the same keys, {kv} KV head{'s' * (kv != '1')} {'find' if kv != '1' else 'finds'} {percent(by_kv)} "
            f"of the attention and {single} query heads {percent(by_query)} (not less in {wins} of {len(found)} "
            f"cases); the query heads agree with one another at {alike:.2f}."
        )
    return [
        *lines,
        "",
        "Query heads of one group look at the same keys, so part of their agreement is that of a head with itself: it "
        "says little of the other heads, which is what the vote is to stand for. Counting the whole group costs no "
        "further byte. That is why the KV head is the default.",
    ]


def _metrics(results: Part) -> list[str]:
    cells = list(_cells(results))
    ratios = sorted({row["ratio"] for row in cells[0][2]["loading"]})
    rows = []
    for metric in dict.fromkeys(row["metric"] for row in cells[0][2]["loading"]):
        for ratio in ratios:
            row: list[object] = [metric, f"{ratio:.0%}"]
            for _, _, part in cells:
                (found,) = _loading(part, metric=metric, ratio=ratio, unit="kv_head", rule="paper")
                row += [found["exact"], percent(found["fallback"])]
            rows.append(row)
    head = ["metric", "tokens chosen"]
    for model, workload, _ in cells:
        head += [f"exact, {model}, {WORKLOADS[workload]}", "layers that fall back"]
    return [
        "## Metrics: which tokens keep the answer right",
        "",
        "Share of questions answered exactly, by the paper's rule with its threshold, KV heads as probe heads. `h2o` "
        "is the paper's metric; `last` looks at the last query token alone; `_pooled` averages "
        f"over 9 neighbouring tokens. With n = {cells[0][2]['questions']} a 95% interval is up to ±"
        f"{1.96 * (0.25 / cells[0][2]['questions']) ** 0.5:.2f}.",
        "",
        *table(head, rows),
        "",
    ]


def _rules(results: Part) -> list[str]:
    rows = []
    for model, workload, part in _cells(results):
        for metric in ("h2o", "last_pooled"):
            for rule, name in RULES.items():
                for row in _loading(part, metric=metric, rule=rule, unit="kv_head", ratio=RATIO):
                    rows.append((model, WORKLOADS[workload], metric, name, row["exact"], percent(row["fallback"]),
                                 percent(row["probe_keys"] + row["fallback_keys"]), percent(row["needed"]),
                                 percent(row["read"])))  # fmt: skip
    head = ("model", "workload", "metric", "rule", "exact", "layers that fall back", "keys for choosing",
            "KV attended over", "all reads")  # fmt: skip
    return [
        "## What the vote costs, and what it saves",
        "",
        f"At {RATIO:.0%}, in shares of the prefix's KV bytes. Where a layer falls back, the K of its tokens is among "
        "the keys that were read for choosing.",
        "",
        *table(head, rows),
        "",
    ]


def _speculation(results: Part) -> list[str]:
    rows = []
    for model, workload, part in _cells(results):
        for metric in ("h2o", "last_pooled"):
            for ratio in sorted({row["ratio"] for row in part["loading"]}):
                (row,) = _loading(part, metric=metric, ratio=ratio, unit="kv_head", rule="paper")
                rows.append((model, WORKLOADS[workload], metric, f"{ratio:.0%}", percent(row["token_recall"]),
                             percent(row["random_recall"]), percent(row["recall"]), percent(row["precision"]),
                             percent(row["wasted"])))  # fmt: skip
    head = ("model", "workload", "metric", "tokens chosen", "recall", "random recall", "recall, bytes",
            "precision, bytes", "wasted, of all KV")  # fmt: skip
    return [
        "## Reading ahead for the next layer",
        "",
        "Recall of the next layer's voted tokens by this layer's, and by as many drawn at random. In bytes it is "
        "measured as it is loaded: a layer that falls back has no use for K that was read ahead, which alone halves "
        "its precision.",
        "",
        *table(head, rows),
        "",
    ]


def _conclusions(results: Part) -> list[str]:
    fallback, lift, precision, best = [], [], [], []
    for _, _, part in _cells(results):
        (row,) = _loading(part, metric="h2o", ratio=RATIO, unit="kv_head", rule="paper")
        fallback.append(row["fallback"])
        lift.append(row["token_recall"] / row["random_recall"])
        precision.append(row["precision"])
        at = _loading(part, ratio=RATIO, unit="kv_head", rule="paper")
        best.append((row["exact"], max(each["exact"] for each in at), part["exact_full"]))
    return [
        "## What follows",
        "",
        f"- With `h2o` at {RATIO:.0%}, {percent(min(fallback))} to {percent(max(fallback))} of the layers fall back; "
        "IMPRESS reports fewer than 20% on OPT. These models have few heads, and heads with different tasks: their "
        "training began so.",
        f"- The paper's metric answers {_range(each[0] for each in best)} of the questions there, the best metric of "
        f"those tried {_range(each[1] for each in best)}, and all KV {_range(each[2] for each in best)}: the metric "
        "matters more here than who votes, and has to be chosen for the model.",
        f"- The layer before guesses {min(lift):.1f} to {max(lift):.1f} times as well as chance. In bytes, "
        f"{percent(min(precision))} to {percent(max(precision))} of what is read ahead is of use. Below a half, "
        "reading ahead occupies the link for longer than it can hide, and the controller stops it unless it is told "
        "that nobody else uses the link.",
    ]


def _range(values: Iterator[float]) -> str:
    found = list(values)
    return f"{min(found):.2f} to {max(found):.2f}"
