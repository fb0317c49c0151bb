"""``docs/results/hyperinfer.md`` from committed results: nothing on the page is written by hand but the reasons."""

from __future__ import annotations

from typing import Any

from bench.papers.claims import made_by, percent, ratio, table, times
from bench.papers.figures import Documents, every_figure
from bench.papers.hyperinfer_figures import PAPER, WORKLOADS, entries, loaded

Part = dict[str, Any]


def render(documents: Documents) -> str:
    """The whole page."""
    modelled, similar = documents["papers_impress"], documents["importance_similarity"]
    lines = [
        f"# {PAPER.title}",
        "",
        "HyperInfer is IMPRESS with prefetching: while a layer computes, what it found important is read for the next "
        "one. Its evaluation repeats IMPRESS's figures and numbers, under other figure numbers; what became of them is "
        "on [that page](impress.md), and listed here again. It adds Figure 12, and no figure that shows what "
        "prefetching brings by itself; that is measured and simulated below.",
        "",
        *every_figure(PAPER, entries(documents)),
        "## Measured: what the layer before knows",
        "",
        made_by(similar, verb="measured"),
        "",
        *_recall(similar["results"]),
        "## Simulated: what a guess is worth",
        "",
        made_by(modelled),
        "",
        *_worth(modelled["results"]["speculation"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _recall(similar: dict[str, Part]) -> list[str]:
    lines = [
        [
            model,
            workload,
            metric,
            f"{row['ratio']:.0%}",
            percent(row["token_recall"]),
            percent(row["random_recall"]),
            times(ratio(row["token_recall"], row["random_recall"])),
            percent(row["precision"]),
            percent(row["wasted"]),
        ]
        for model, part in similar.items()
        for workload in WORKLOADS
        for metric in ("h2o", "last_pooled")
        for row in loaded(part[workload], metric)
    ]
    head = ["model", "workload", "metric", "kept", "recall", "at random", "over random", "bytes of use", "in vain"]
    return [
        "Of the next layer's tokens, those that this layer found important; then, of the bytes that are read ahead, "
        "those that are of use, and of all KV what is read in vain. "
        "[More of it](importance.md#reading-ahead-for-the-next-layer).",
        "",
        *table(head, lines),
        "",
    ]


def _worth(rows: list[Part]) -> list[str]:
    recalls = [name for name in rows[0]["ttft_ms"] if name != "score"]
    lines = [
        [
            row["model"],
            row["query"],
            f"{row['ttft_ms']['score']:.0f}",
            *(times(ratio(row["ttft_ms"]["score"], row["ttft_ms"][name])) for name in recalls),
        ]
        for row in rows
    ]
    head = ["model", "question, tokens", "without, ms", *(f"{float(name):.0%} right" for name in recalls)]
    return [
        "IMPRESS on RTE's bytes with 25% kept ([setting](impress.md#simulated-setting)), and guesses that are as large "
        "as what is wanted, of which more and more are right. TTFT without guessing over TTFT with it:",
        "",
        *table(head, lines),
        "",
        "A layer of these models computes a question in a fraction of a millisecond to a few, and its reads take "
        "several: what can be hidden is the computation alone. A guess that is wrong is read before what is wanted, "
        "on a disk that never rests. So it takes guesses that are mostly right, or questions long enough to compute "
        "for as long as the disk reads. Thermocline reads ahead only while a controller finds that more than half of "
        "the bytes are of use (`services/worker/importance/speculation_control.py`).",
        "",
    ]
