"""What became of each figure of IMPRESS: the list that its page and the index are made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.papers.claims import percent, ratio, times
from bench.papers.figures import Direction, Documents, Entry, Marking, Paper, judged, spread

PAPER = Paper(
    name="IMPRESS",
    page="impress.md",
    title="IMPRESS's figures, simulated and on small models",
    figures=25,
    tables=0,
    drawings={
        "Figure 1": "model",
        "Figure 2": "cases",
        "Figure 6": "overview",
        "Figure 9": "a layer's steps",
        "Figure 10": "time lines",
        "Figure 12": "reordering",
        "Figure 13": "metadata",
        "Figure 14": "replacement",
    },
    results=(
        "papers_impress",
        "papers_impress_measured",
        "importance_similarity",
        "importance_quality",
        "importance_recommended",
        "importance_serving",
    ),
)

SIMULATED = "python -m bench.papers.impress"
MEASURED = "python -m bench.papers.impress_measured"
SIMILARITY = "python -m bench.importance_similarity --save"
QUALITY = "python -m bench.importance_quality --questions 800 --save"
RECOMMENDED = "python -m bench.importance_quality --recommended --questions 2000 --save"
SERVING = (
    "python -m bench.importance_serving --mb-per-s 5,20 --documents 8 --document-tokens 2000 --questions 80 "
    "--rounds 1 --save"
)

LEADING, BEST = "h2o_lfu", "score"
STEPS = ("identification", "reordering", "score")
PAPER_METRIC, POOLED = "h2o", "last_pooled"

_CACHED = (
    "What is cached decides here: a lossy request leaves nothing in memory, so an LFU that happens to hold the middle "
    "of the distribution has what is asked for, and warming makes up for most of that on the slower disk."
)
_SCORED = (
    "By the model a score of uses times importance keeps dense chunks in memory, and lets go of chunks of which "
    "little is wanted at a time, though often. The link is spared by that, but from the disk whole chunks come."
)

Part = dict[str, Any]


def entries(documents: Documents) -> list[Entry]:
    """Every figure and stated number, in the paper's order."""
    modelled = documents["papers_impress"]["results"]
    counted = documents["papers_impress_measured"]["results"]
    similar = documents["importance_similarity"]["results"]
    quality = documents["importance_quality"]["results"]["compared"][0]
    recommended = documents["importance_recommended"]["results"]["recommended"]
    served = documents["importance_serving"]["results"]
    return [
        _breakdown(modelled["breakdown"]),
        _static(counted, quality),
        *_chunks(counted),
        *_similarity(similar),
        *_thresholds(counted),
        *_quality(quality, recommended),
        *_ttft(modelled["main"], served),
        *_tail(modelled["main"], served),
        _loading(modelled["main"], served),
        *_steps(modelled["main"], served),
        _by_layer(counted),
        *_reordering(counted),
        _device_hits(modelled["main"]),
        _alphas(counted),
        _ratios_of("Figure 23", "chunks of 16 to 256 tokens: TTFT of AS+H2O+LFU over IMPRESS's", "2.2 to 2.4×",
                   modelled["by_chunk_tokens"].values(), "#figure-23-chunk-sizes"),
        _ratios_of("Figure 24", "datasets of 65 to 400 GB: the same", "1.2 to 2.0×",
                   modelled["by_dataset_gb"].values(), "#figure-24-dataset-sizes"),
        _ratios_of("Figure 25", "Llama-2-7B and 13B on PIQA and COPA: the same", "1.7 to 2.7×",
                   [found for part in modelled["llama"].values() for found in part.values()],
                   "#figures-16-17-21-and-25-ttft-loading-hits"),
        _overheads(),
    ]  # fmt: skip


def _entry(figure: str, what: str, paper: str, marking: Marking, here: str, direction: Direction, command: str,
           where: str, why: str = "") -> Entry:  # fmt: skip
    return Entry(figure=figure, what=what, paper=paper, marking=marking, here=here, direction=direction,
                 command=command, where=where, why="" if direction == "yes" else why)  # fmt: skip


def _breakdown(rows: list[Part]) -> Entry:
    waits = [row["disk_waiting"] for row in rows]
    slower = [ratio(row["disk"], row["recompute"]) for row in rows]
    memory = [ratio(row["recompute"], row["host"]) for row in rows]
    return _entry(
        "Figure 3",
        "TTFT by tier, 128 to 8K tokens: waiting for the SSD; SSD over recomputing; recomputing over host memory",
        "51 to 98%; above 1; above 1",
        "simulated",
        f"{percent(min(waits))} to {percent(max(waits))}; {spread(slower)}; {spread(memory)}",
        judged([*slower, *memory]),
        SIMULATED,
        "#figure-3-a-prefix-from-each-tier",
        "A model's own step, which reads all weights, hides the load of a hundred tokens; and OPT-30B takes longer to "
        "recompute than to read at 5 GB/s, at every length. The paper does not say which model its figure has.",
    )


def _rows(counted: dict[str, Part], metric: str, **where: Any) -> list[Part]:
    """Of both models, in order."""
    return [
        row
        for model in counted.values()
        for row in model["chunks"]
        if row["metric"] == metric and all(row[key] == value for key, value in where.items())
    ]


def _static(counted: dict[str, Part], quality: Part) -> Entry:
    recalls = [row["static_recall"] for row in _rows(counted, PAPER_METRIC, chunk_tokens=0)]
    drops = [one["drop_points"] for one in quality["methods"] if one["method"] == "static"]
    return _entry(
        "Figure 4",
        "tokens known before from other questions: recall, and accuracy lost",
        "recall above 80%, up to 5 and 3.3 points lost",
        "measured",
        f"recall {percent(min(recalls))} to {percent(max(recalls))}; {min(drops):.0f} to {max(drops):.0f} points lost",
        "yes" if min(drops) > 0 else "no",
        MEASURED,
        "#figures-4-5-and-20-tokens-and-chunks",
    )


def _chunks(counted: dict[str, Part]) -> list[Entry]:
    halves = [row["important_in_read"] for row in _rows(counted, PAPER_METRIC, ratio=0.5, chunk_tokens=64)]
    found = [
        row["hot_is_important"]
        for row in _rows(counted, PAPER_METRIC, ratio=0.1)
        if row["chunk_tokens"] and "hot_is_important" in row
    ]
    is_weak = max(abs(each) for each in found) < 0.5
    where = "#figures-4-5-and-20-tokens-and-chunks"
    return [
        _entry("Figure 5 (a)", "important share of what is read in chunks of 64 tokens, half being important",
               "46%: 2.2× as much as wanted", "measured",
               f"{percent(min(halves))}: {times(1 / min(halves))}",
               "yes" if max(halves) < 0.75 else "no", MEASURED, where),
        _entry("Figure 5 (b)", "how often a chunk is read says little about its importance: correlation, 10% wanted",
               "none; no number", "measured", f"{min(found):.2f} to {max(found):.2f}",
               "yes" if is_weak else "partly", MEASURED, where,
               "With five questions on a document what is read by more of them is also somewhat denser, at some sizes "
               "of chunks and ratios."),
    ]  # fmt: skip


def _similarity(similar: dict[str, Part]) -> list[Entry]:
    cells = [part[workload] for part in similar.values() for workload in ("documents", "few_shot")]
    h2o = [[row for row in part["similarity"] if row["metric"] == PAPER_METRIC] for part in cells]

    def mean(ratio_: float) -> list[float]:
        return [statistics.mean(row["heads"] for row in rows if row["ratio"] == ratio_) for rows in h2o]

    tenth, most = mean(0.1), mean(0.4)
    over_chance = [ratio(row["heads"], row["chance"]) for rows in h2o for row in rows]
    middle = [row["heads"] for rows in h2o for row in rows if row["layer"] in (1, 2)]
    few = "These models have six heads that were trained to do different things; the paper's have 32 to 56."
    return [
        _entry("Figure 7 (b)", "similarity of heads in a middle layer of OPT-6.7B", "above 0.95", "measured",
               f"at most {max(middle):.2f}, at 50%", "no", SIMILARITY, "importance.md#similarity-across-heads",
               few + " The paper does not say for which share of tokens its heat map is."),
        _entry("Figure 8", "average similarity of heads at 10% and 40%; more than by chance in most layers",
               "0.48, 0.68 (OPT-30B)", "measured",
               f"{_range(tenth)}, {_range(most)}; {spread(over_chance)} of chance", judged(over_chance), SIMILARITY,
               "importance.md#similarity-across-heads", few),
    ]  # fmt: skip


def thresholds(counted: dict[str, Part], metric: str) -> dict[str, list[Part]]:
    """By model, in order of alpha."""
    return {
        name: sorted((row for row in part["thresholds"] if row["metric"] == metric), key=lambda row: row["alpha"])
        for name, part in counted.items()
    }


def _thresholds(counted: dict[str, Part]) -> list[Entry]:
    found = thresholds(counted, PAPER_METRIC)
    keys = [ratio(rows[0]["keys"], rows[-1]["keys"]) for rows in found.values()]
    lost = [100 * (rows[0]["exact"] - rows[-1]["exact"]) for rows in found.values()]
    return [
        _entry("Figure 11", "threshold from 1 to 0 at 25%: keys read less, accuracy lost", "4×; 1.6 points", "measured",
               f"{spread(keys)}; {_points(lost)}", judged(keys), MEASURED, "#figures-11-19-and-22-thresholds",
               "Three of the grouped model's three KV heads are all of them, so that nothing is saved; of the other "
               "model's six they are half. With 30 questions one answer is 3.3 points."),
    ]  # fmt: skip


def _quality(quality: Part, recommended: list[Part]) -> list[Entry]:
    by_metric = [one["drop_points"] for one in quality["methods"] if one["method"] == "importance"]
    best = [one["drop_points"] for part in recommended for one in part["methods"]]
    return [
        _entry("Figure 15", "accuracy lost with 50 to 5% kept, with the metric that suits the model", "under 1 point",
               "measured", _points(best), "yes" if max(best) < 1 else "partly", RECOMMENDED,
               "quality.md#the-recommended-way"),
        _entry("Figure 15", "the same with the paper's metric", "under 1 point", "measured", _points(by_metric),
               "yes" if max(by_metric) < 1 else "no", QUALITY, "quality.md#methods-at-equal-retention",
               "These small models answer by a few tokens of a document, which the last query token looks at; sums "
               "over all query tokens drown them. The metric has to be chosen for the model."),
    ]  # fmt: skip


def _clustered(main: Part) -> list[dict[str, Part]]:
    return [found for datasets in main["clustered"].values() for found in datasets.values()]


def _over(rows: Iterable[dict[str, Part]], slow: str, fast: str, key: str = "ttft_ms") -> list[float]:
    return [ratio(found[slow][key], found[fast][key]) for found in rows]


def _served(served: Part) -> list[dict[str, Part]]:
    """By disk, each with its systems."""
    by_rate: dict[float, dict[str, Part]] = {}
    for figure in served["figures"]:
        by_rate.setdefault(figure["mb_per_s"], {})[figure["system"]] = figure
    return list(by_rate.values())


def _ttft(main: Part, served: Part) -> list[Entry]:
    leading = _over(_clustered(main), LEADING, BEST)
    everything = _over(_clustered(main), "everything", BEST)
    on_cpu = _over(_served(served), LEADING, BEST, "ttft_mean_ms")
    all_on_cpu = _over(_served(served), "everything", BEST, "ttft_mean_ms")
    return [
        _entry("Figure 16", "mean TTFT over IMPRESS's, three models, four datasets: AS+H2O+LFU; AS-like", "1.2 to 2.8×",
               "simulated", f"{spread(leading)}; {spread(everything)}", judged([*leading, *everything]), SIMULATED,
               "#figures-16-17-21-and-25-ttft-loading-hits", _SCORED),
        _entry("Figure 16", "the same in whole cells on a CPU, disk of 5 and 20 MB/s, 10% kept", "1.2 to 2.8×",
               "measured", f"{spread(on_cpu)}; {spread(all_on_cpu)}", judged([*on_cpu, *all_on_cpu]), SERVING,
               "importance-serving.md", _CACHED),
    ]  # fmt: skip


def _tail(main: Part, served: Part) -> list[Entry]:
    rows = [datasets["RTE"] for datasets in main["clustered"].values()]
    modelled = [value for system in ("everything", "h2o_lru", LEADING) for value in
                _over(rows, system, BEST, "ttft_p99_ms")]  # fmt: skip
    on_cpu = [value for system in ("everything", "h2o_lru", LEADING) for value in
              _over(_served(served), system, BEST, "ttft_p99_ms")]  # fmt: skip
    return [
        _entry("6.2", "p99 TTFT on RTE over IMPRESS's: AS-like, AS+H2O+LRU, AS+H2O+LFU", "3.2×, 2.2×, 2.0× (OPT-30B)",
               "simulated", spread(modelled), judged(modelled), SIMULATED,
               "#figures-16-17-21-and-25-ttft-loading-hits", _SCORED),
        _entry("6.2", "the same in whole cells on a CPU", "3.2×, 2.2×, 2.0×", "measured", spread(on_cpu),
               judged(on_cpu), SERVING, "importance-serving.md", _CACHED),
    ]  # fmt: skip


def _loading(main: Part, served: Part) -> Entry:
    rows = [datasets["RTE"] for datasets in main["clustered"].values()]
    found = [value for system in ("everything", "h2o_lru", LEADING) for value in _over(rows, system, BEST, "io_ms")]
    return _entry(
        "Figure 17", "loading a prefix on RTE, over IMPRESS's: AS-like, AS+H2O+LRU, AS+H2O+LFU", "1.5 to 3.8×",
        "simulated", spread(found), judged(found), SIMULATED, "#figures-16-17-21-and-25-ttft-loading-hits", _SCORED,
    )  # fmt: skip


def steps_of(rows: Sequence[dict[str, Part]], key: str) -> dict[str, list[float]]:
    """What each technique adds: TTFT of the step before over its own."""
    before, found = LEADING, {}
    for step in STEPS:
        found[step] = _over(rows, before, step, key)
        before = step
    return found


def _steps(main: Part, served: Part) -> list[Entry]:
    modelled = steps_of(_clustered(main), "ttft_ms")
    on_cpu = steps_of(_served(served), "ttft_mean_ms")

    def shown(found: dict[str, list[float]]) -> str:
        return ", ".join(spread(values) for values in found.values())

    def all_of(found: dict[str, list[float]]) -> Direction:
        return judged([value for values in found.values() for value in values])

    what = "each technique reduces TTFT: identification, reordering, score"
    return [
        _entry("Figure 18", what, "each; 60, 30, 10% (OPT-30B, RTE)", "simulated", shown(modelled), all_of(modelled),
               SIMULATED, "#figure-18-each-technique",
               "Where half is kept (COPA) identification spares next to nothing. " + _SCORED),
        _entry("Figure 18", f"{what}, in whole cells on a CPU (small blocks between the first two)", "each", "measured",
               shown(on_cpu), all_of(on_cpu), SERVING, "importance-serving.md", _CACHED),
    ]  # fmt: skip


def _by_layer(counted: dict[str, Part]) -> Entry:
    found = {name: _at(rows, 0.6)["layers"] for name, rows in thresholds(counted, PAPER_METRIC).items()}
    shown = "; ".join(f"{name} {', '.join(percent(each) for each in layers)}" for name, layers in found.items())
    differs = [max(layers) - min(layers) > 0.005 for layers in found.values()]
    return _entry(
        "Figure 19", "KV read in each layer, chosen layer by layer, at 25%", "varies by layer; no number", "measured",
        shown, "yes" if all(differs) else "partly" if any(differs) else "no", MEASURED,
        "#figures-11-19-and-22-thresholds",
        "Where probe heads disagree in every layer all are alike.",
    )  # fmt: skip


def _at(rows: list[Part], alpha: float) -> Part:
    return next(row for row in rows if row["alpha"] == alpha)


def _reordering(counted: dict[str, Part]) -> list[Entry]:
    return [
        _repacked(counted, PAPER_METRIC, "chunks read before and after a prefix is repacked by importance to others",
                  "Where half of the tokens are wanted, hardly a chunk of 64 is spared in any order."),
        _repacked(counted, POOLED, "the same with the metric that suits the models",
                  "It wants runs of neighbouring tokens, another one for each question: they lie in few chunks as they "
                  "are, and repacking by what others want scatters them."),
    ]  # fmt: skip


def _repacked(counted: dict[str, Part], metric: str, what: str, why: str) -> Entry:
    rows = [row for row in _rows(counted, metric) if row["chunk_tokens"]]
    found = [ratio(row["chunks_read"], row["chunks_read_reordered"]) for row in rows]
    here = f"{times(statistics.mean(found))} on average, {spread(found)}"
    return _entry("Figure 20", what, "1.2× on average", "measured", here, judged(found), MEASURED,
                  "#figures-4-5-and-20-tokens-and-chunks", why)  # fmt: skip


def _device_hits(main: Part) -> Entry:
    rows = _clustered(main)
    before, after = (statistics.mean(found[name]["device_hits"] for found in rows) for name in ("reordering", BEST))
    gains = [ratio(found[BEST]["device_hits"], found["reordering"]["device_hits"]) for found in rows]
    return _entry(
        "Figure 21", "device hits of chunks, LFU and by score, mean of all datasets", "68% to 80%", "simulated",
        f"{percent(before)} to {percent(after)}", judged(gains), SIMULATED,
        "#figures-16-17-21-and-25-ttft-loading-hits",
        "10 GB are a sixth of what is asked for; what counts as a hit the paper does not say.",
    )  # fmt: skip


def _alphas(counted: dict[str, Part]) -> Entry:
    found, pooled = thresholds(counted, PAPER_METRIC), thresholds(counted, POOLED)
    read = [ratio(rows[0]["read"], rows[-1]["read"]) for rows in found.values()]

    def right(by_model: dict[str, list[Part]]) -> str:
        return ", ".join(f"{name} {rows[0]['exact']:.0%} to {rows[-1]['exact']:.0%}" for name, rows in by_model.items())

    return _entry(
        "Figure 22", "alpha from 0 to 2: less is read (TTFT in the paper), and accuracy hardly changes",
        "no number", "measured",
        f"reads {spread(read)} less; right: {right(found)}; by the pooled metric {right(pooled)}",
        judged(read), MEASURED, "#figures-11-19-and-22-thresholds",
        "In the grouped model accepting the vote reads more than refusing it, because all its keys are read anyhow. By "
        "the paper's metric a vote costs the other model answers, by the pooled one none.",
    )  # fmt: skip


def _ratios_of(figure: str, what: str, paper: str, rows: Iterable[dict[str, Part]], where: str) -> Entry:
    found = _over(rows, LEADING, BEST)
    return _entry(figure, what, paper, "simulated", spread(found), judged(found), SIMULATED, where, _SCORED)


def _overheads() -> Entry:
    return Entry(
        figure="6.5",
        what="overheads: probe heads' keys 6% of the time, repacking under a minute, 0.5 and 1.2% of space",
        paper="6%; 0.5%, 1.2%",
        marking="not run",
        where="../concepts/importance.md",
        why="Here a chunk that can be read in part is a second copy of it on the disk, with probe heads' keys apart: "
        "it takes about as much room again, by decision (ADR 0015). What repacking reads is on the page of serving; "
        "how long choosing takes is not measured by itself.",
    )


def _points(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f} points"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
