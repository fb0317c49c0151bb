"""What became of each figure of Strata: the list that its page and the index are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.papers.claims import percent, ratio, times
from bench.papers.figures import Direction, Documents, Entry, Paper, judged, spread
from bench.papers.simulated import Row
from bench.papers.strata_curves import SMALL_PAGES, best_at_same_ttft, by_page_size, peak, stall_share

PAPER = Paper(
    name="Strata",
    page="strata.md",
    title="Strata's figures, simulated",
    figures=14,
    tables=1,
    drawings={"Figure 4": "architecture", "Figure 6": "layouts", "Figure 7": "scheduling policies"},
    results=("papers_strata", "papers_strata_machines", "transfers"),
)

RUN = "python -m bench.papers.strata"
MACHINES = "python -m bench.papers.strata_machines"
LAYOUTS = "python -m bench.transfers --rounds 11"
INTERFERENCE = "python -m bench.gpu.interference"
STATISTICS = (
    "python -m thermocline simulate --workload documents --hardware h200-pcie5 --model qwen2.5-14b --requests 100"
)

_LOOGLE = {"llama-3.1-8b": 3.2, "qwen2.5-14b": 3.9, "llama-3.1-70b": 5.0}
"""5.2.1: throughput over SGLang-HiCache at the same TTFT."""

_NEAR_ORACLE = 1.1
"""The paper says comparable; its figure has no number in the text."""

Part = dict[str, Any]


def entries(documents: Documents) -> list[Entry]:
    """Every figure, table and stated number, in the paper's order."""
    first = documents["papers_strata"]["results"]
    second = documents["papers_strata_machines"]["results"]
    return [
        _stalls(first["curves"]),
        _chat_pages(second["chat_page_sizes"]),
        _copies(second["copies"]),
        _interference(),
        _statistics(),
        *_end_to_end(first["curves"], second),
        *_curves(first["curves"]),
        _page_sizes(by_page_size(second["page_sizes"], first["curves"])),
        *_distances(first["distances"]),
        *_layouts(documents["transfers"]["results"]["disk_layout"]),
        *_links(second["links"]),
    ]


def _stalls(curves: dict[str, list[Row]]) -> Entry:
    plain, assisted = (stall_share(curves[name][-1]) for name in ("HiCache", "+ IO"))
    return Entry(
        figure="Figure 1",
        what="prefill time that waits for loads: copies page by page, GPU-assisted (LooGLE, Qwen2.5-14B)",
        paper="74%, up to 24%",
        marking="simulated",
        here=f"{percent(plain)}, {percent(assisted)} of all steps at the highest rate",
        direction="yes" if plain > assisted > 0 else "no",
        command=MACHINES,
        where="#figure-1-stalls-by-loaded-tokens-for-each-new-one",
    )


def _chat_pages(rows: dict[str, Row]) -> Entry:
    found = list(rows.values())
    hits = [ratio(found[0]["device_hit_ratio"], row["device_hit_ratio"]) for row in found[-1:]]
    mean = ratio(found[-1]["ttft_ms"], found[0]["ttft_ms"])
    p90 = ratio(found[-1]["ttft_p90_ms"], found[0]["ttft_p90_ms"])
    return Entry(
        figure="Figure 2",
        what="pages from 1 to 1,024 tokens, ShareGPT, Mistral-24B: hits fall, mean and P90 TTFT rise",
        paper="up to 2×, 2.9×",
        marking="simulated",
        here=f"hits {spread(hits)} less; {times(mean)}, {times(p90)}",
        direction=judged([*hits, mean, p90]),
        command=MACHINES,
        where="#figure-2-large-pages",
    )


def _copies(rows: list[Part]) -> Entry:
    at = {(row["hardware"], row["page_size"]): row["per_page_share"] for row in rows}
    return Entry(
        figure="Figure 3",
        what="part of PCIe 5.0 and of Grace Hopper's link that copies of 32 tokens reach",
        paper="about 22%, 5%",
        marking="simulated",
        here=f"{percent(at['h200-pcie5', 32])}, {percent(at['gh200', 32])}",
        command=MACHINES,
        where="#figure-3-loading-8192-tokens-of-llama-31-8b",
        why="An input: the link's model was made to have these numbers.",
    )


def _interference() -> Entry:
    return Entry(
        figure="Figure 5",
        what="what an I/O kernel of two blocks takes from prefill and decode (4.2)",
        paper="under 5%, 10% at nearly 50 GB/s; under 5% end to end",
        marking="not run",
        command=INTERFERENCE,
        why="It takes a GPU. The command measures it where there is one; on this machine the kernel was only proven "
        "right, in an interpreter.",
    )


def _statistics() -> Entry:
    return Entry(
        figure="Table 1",
        what="statistics of the datasets",
        paper="LooGLE 21,613 tokens in, 15.60 out, 105 contexts, 2,410 queries; and three more",
        marking="simulated",
        here="the generators have these numbers and averages",
        command=STATISTICS,
        where="../how-to/simulate.md",
        why="An input: documents are drawn around these averages, not taken from the datasets.",
    )


def _end_to_end(qwen: dict[str, list[Row]], results: Part) -> list[Entry]:
    curves = results["loogle"] | {"qwen2.5-14b": {"HiCache": qwen["HiCache"], "Strata": qwen["full"]}}
    found = [_loogle(model, curves[model], claimed) for model, claimed in _LOOGLE.items()]
    review = _over_hicache(results["reviewmt"])
    narrative = _over_hicache(results["narrativeqa"])
    return [
        *found,
        _figure_8(
            "ReviewMT, llama-3.1-8b: peak throughput over SGLang-HiCache", "1.7×", spread(review), judged(review),
            "With 208 tokens an answer decoding takes most of the time.",
        ),
        _figure_8(
            "NarrativeQA, 8B and 70B: peak throughput (the paper's numbers are over vLLM-LMCache, warm)",
            "2.3 to 2.6×", f"{spread(narrative)} over HiCache, cold", judged(narrative),
        ),
        _short(results["sharegpt"]),
        Entry(
            figure="Figure 8",
            what="over vLLM-LMCache and TensorRT-LLM with HiCache, all datasets",
            paper="1.9 to 5×",
            marking="not run",
            why="They are engines of their own on GPUs; a model of them would say what was put into it.",
        ),
    ]  # fmt: skip


def _loogle(model: str, curves: dict[str, list[Row]], claimed: float) -> Entry:
    best = best_at_same_ttft(curves["Strata"], curves["HiCache"])
    value = best[0] if best else ratio(peak(curves["Strata"]), peak(curves["HiCache"]))
    here = f"up to {times(value)} " + (f"at {best[1] / 1e3:g} s" if best else "at peak")
    ratios = [value]
    if "SGLang" in curves:
        ratios.append(ratio(peak(curves["HiCache"]), peak(curves["SGLang"])))
        here += f"; HiCache {times(ratios[-1])} of no host tier"
    what = f"LooGLE, {model}: throughput at the same TTFT over SGLang-HiCache"
    entry = _figure_8(what, f"up to {claimed:g}×", here, judged(ratios))
    if model == "qwen2.5-14b":
        return replace(entry, where="#figure-9-throughput-against-ttft", command=RUN)
    return entry


def _over_hicache(models: dict[str, dict[str, Row]]) -> list[float]:
    return [
        ratio(rows["Strata"]["output_tokens_per_s"], rows["HiCache"]["output_tokens_per_s"]) for rows in models.values()
    ]


def _figure_8(what: str, paper: str, here: str, direction: Direction, why: str = "") -> Entry:
    return Entry(
        figure="Figure 8",
        what=what,
        paper=paper,
        marking="simulated",
        here=here,
        direction=direction,
        command=MACHINES,
        where="#figure-8-models-and-datasets",
        why=why if direction != "yes" else "",
    )


def _short(found: dict[str, dict[str, Row]]) -> Entry:
    """No worse than the base engine: the claim is that nothing is lost."""
    worst = max(ratio(rows["Strata"]["ttft_ms"], rows["SGLang"]["ttft_ms"]) for rows in found.values())
    return _figure_8(
        "ShareGPT, llama-3.1-8b: TTFT no worse on short contexts",
        "comparable",
        f"at most {times(worst)} of SGLang's",
        "yes" if worst <= _NEAR_ORACLE else "no",
        "Loads that a short context waits for are longer than computing what they save.",
    )


def _curves(curves: dict[str, list[Row]]) -> list[Entry]:
    base = peak(curves["HiCache"])
    gains = [ratio(peak(curves[name]), base) for name in ("+ schedule", "+ IO")]
    lpm = [ratio(lpm["ttft_ms"], full["ttft_ms"]) for lpm, full in _high_rates(curves)]
    where = "#figure-9-throughput-against-ttft"
    return [
        Entry(
            figure="Figure 9",
            what="peak throughput of scheduling alone and of I/O alone over HiCache",
            paper="1.8×, 2.3×",
            marking="simulated",
            here=", ".join(times(value) for value in gains),
            direction=judged(gains),
            command=RUN,
            where=where,
        ),
        Entry(
            figure="Figure 9",
            what="LPM gains at low rates only, Strata at high ones too: TTFT over Strata's at 4/s and more",
            paper="above 1; no number",
            marking="simulated",
            here=spread(lpm),
            direction=judged(lpm),
            command=RUN,
            where=where,
        ),
        Entry(
            figure="Figure 9",
            what="vLLM-LMCache and TensorRT-HiCache against + IO",
            paper="comparable at low rates, behind at high ones",
            marking="not run",
            why="They are engines of their own on GPUs.",
        ),
    ]


def _high_rates(curves: dict[str, list[Row]]) -> list[tuple[Row, Row]]:
    pairs = zip(curves["+ IO + LPM"], curves["full"], strict=True)
    return [(lpm, full) for lpm, full in pairs if lpm["rate"] >= 4]


def _page_sizes(rows: dict[str, Row]) -> Entry:
    best = rows[SMALL_PAGES]["output_tokens_per_s"]
    large = {name: row["output_tokens_per_s"] / best for name, row in rows.items() if name.startswith("HiCache")}
    name, value = max(large.items(), key=lambda each: each[1])
    sizes = list(large)
    falls_again = sizes.index(name) < len(sizes) - 1
    return Entry(
        figure="Figure 10",
        what="HiCache's best page size, of + IO with small pages; too large ones lose again",
        paper="93% at 512",
        marking="simulated",
        here=f"{percent(value)} at {name.partition(', ')[2]}",
        direction="yes" if value <= 1 and falls_again else "partly" if value <= 1 or falls_again else "no",
        command=MACHINES,
        where="#figure-10-page-sizes",
        why=""
        if value <= 1 and falls_again
        else "A copy of some MiB reaches 90% of the link by this model and a gather kernel 77% at any size, so the "
        "largest pages copy better here than GPU-assisted loads; and documents of 21 thousand tokens lose few hits to "
        "pages of a thousand.",
    )


def _distances(distances: dict[str, dict[str, Row]]) -> list[Entry]:
    def gain(distance: str, step: str, before: str) -> float:
        rows = distances[distance]
        return ratio(rows[step]["output_tokens_per_s"], rows[before]["output_tokens_per_s"])

    deferral = {distance: gain(distance, "+ deferral", "baseline") - 1 for distance in distances}
    io = [gain(distance, "+ IO", "+ deferral") for distance in ("shuffled", "max")]
    balanced = [gain(distance, "+ balanced batches", "+ IO") for distance in ("shuffled", "max")]
    bubbles = [gain(distance, "+ bubble filling", "+ balanced batches") for distance in ("shuffled", "max")]
    where = "#figure-11-cache-distance"

    def entry(what: str, paper: str, here: str, direction: Direction, why: str = "") -> Entry:
        return Entry(figure="Figure 11", what=what, paper=paper, marking="simulated", here=here, direction=direction,
                     command=RUN, where=where, why=why)  # fmt: skip

    def added(values: list[float]) -> str:
        return ", ".join(percent(value - 1) for value in values)

    more = "" if bubbles[0] > bubbles[1] else (
        "It gains at both distances, but more at max than shuffled; the paper has it the other way round, by "
        "variance. Here max leaves more loads for it to hide."
    )  # fmt: skip
    return [
        entry(
            "delay hits: what deferral adds at minimum and maximum distance", "42%, nothing",
            f"{percent(deferral['min'])}, {percent(deferral['max'])}",
            "yes" if deferral["min"] > 0.05 > abs(deferral["max"]) else "partly",
        ),
        entry("I/O, shuffled and maximum", "76%, 95%", added(io), judged(io)),
        entry("balanced batches, shuffled and maximum", "11%, 12%", added(balanced), judged(balanced)),
        entry("bubble filling, shuffled and maximum; more where shuffled", "8%, 3%", added(bubbles),
              "yes" if not more else "partly", more),
    ]  # fmt: skip


def _layouts(found: dict[str, Part]) -> list[Entry]:
    ratios = [part["ratio"] for part in found.values()]
    return [
        Entry(
            figure="Figure 12",
            what="8,192 tokens from disk, pages of 32: layer-first over page-first",
            paper="up to 4×",
            marking="measured",
            here=spread(ratios),
            direction=judged(ratios),
            command=LAYOUTS,
            where="data-plane.md#page-first-against-layer-first-strata-figure-12",
        )
    ]


def _links(found: dict[str, Row]) -> list[Entry]:
    def over(slow: str, fast: str) -> float:
        return ratio(found[slow]["ttft_ms"], found[fast]["ttft_ms"])

    def entry(what: str, paper: str, here: float, direction: Direction, why: str) -> Entry:
        return Entry(
            figure="Figure 13",
            what=what,
            paper=paper,
            marking="simulated",
            here=times(here),
            direction=direction,
            command=MACHINES,
            where=where,
            why="" if direction == "yes" else why,
        )

    where = "#figures-13-and-14-a-faster-link"
    hicache, only_io = over("HiCache, GH", "+ IO, PCIe"), over("+ IO, GH", "Strata, PCIe")
    oracle = over("Strata, GH", "oracle, GH")
    sustained = {name: row["sustained_gb_s"] for name, row in found.items()}
    return [
        entry("TTFT: HiCache on Grace Hopper over + IO on PCIe 5.0", "above 1; no number", hicache, judged([hicache]),
              "Copies of 32 tokens one by one are a little faster there by this model, and computing hides more of "
              "them."),
        entry("TTFT: + IO on Grace Hopper over Strata on PCIe 5.0", "above 1; no number", only_io, judged([only_io]),
              "With 150 GB/s hardly a load of this model is waited for, so that scheduling has little left to win on "
              "Grace Hopper, and a link at a third of its speed cannot make up for it."),
        entry("TTFT: Strata on Grace Hopper over a link without cost", "comparable", oracle,
              "yes" if oracle <= _NEAR_ORACLE else "no", "Loads are still waited for at this rate."),
        Entry(
            figure="Figure 14",
            what="sustained bandwidth of loads, PCIe 5.0 and Grace Hopper, with + IO",
            paper="40, 150 GB/s",
            marking="simulated",
            here=f"{sustained['+ IO, PCIe']:.0f}, {sustained['+ IO, GH']:.0f} GB/s; HiCache "
            f"{sustained['HiCache, PCIe']:.0f}, {sustained['HiCache, GH']:.0f}",
            command=MACHINES,
            where=where,
            why="An input: what the link's model has for these ways of copying.",
        ),
    ]  # fmt: skip
