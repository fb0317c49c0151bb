"""The parts of Strata's page about its other machines, models and datasets."""

from __future__ import annotations

from typing import Any

from bench.papers.claims import percent, ratio, table, times
from bench.papers.simulated import Row
from bench.papers.strata_curves import SMALL_PAGES, best_at_same_ttft, by_page_size, peak, stall_share

Part = dict[str, Any]


def machines(results: Part, curves: dict[str, list[Row]], origin: str) -> list[str]:
    """Everything of :mod:`bench.papers.strata_machines`, and Figure 9's curves where it needs them."""
    return [
        "## Other machines, models and datasets",
        "",
        origin + " *SGLang* has no host tier here, *HiCache* copies pages of 32 tokens one by one, *Strata* is the "
        "whole of it.",
        "",
        *_stalls(results["stalls"]),
        *_chat_pages(results["chat_page_sizes"]),
        *_copies(results["copies"]),
        *_panels(results),
        *_page_sizes(by_page_size(results["page_sizes"], curves)),
        *_links(results["links"]),
    ]


def _stalls(rows: list[dict[str, float]]) -> list[str]:
    lines = [
        [f"{row['new_tokens']:.0f}", f"{row['ratio']:.0f}", percent(row["per-page"]), percent(row["assisted"])]
        for row in rows
    ]
    return [
        "### Figure 1: stalls by loaded tokens for each new one",
        "",
        "Qwen2.5-14B on one H200: what of a prefill batch is spent waiting for its loads.",
        "",
        *table(["new tokens", "loaded for each", "page by page", "GPU-assisted"], lines),
        "",
        "The paper's threshold of 100 (4.3.2) is where stalls begin for GPU-assisted loads. By this model that holds "
        "for batches of a question or two, whose step takes as long as reading the weights; for larger ones stalls "
        "begin earlier.",
        "",
    ]


def _chat_pages(rows: dict[str, Row]) -> list[str]:
    base = next(iter(rows.values()))
    lines = [
        [
            size,
            percent(row["device_hit_ratio"]),
            row["ttft_ms"],
            times(ratio(row["ttft_ms"], base["ttft_ms"])),
            row["ttft_p90_ms"],
            times(ratio(row["ttft_p90_ms"], base["ttft_p90_ms"])),
        ]
        for size, row in rows.items()
    ]
    head = ["page size", "hits", "mean TTFT, ms", "over page size 1", "P90 TTFT, ms", "over page size 1"]
    return [
        "### Figure 2: large pages",
        "",
        "Conversations of ShareGPT's lengths on Mistral-24B and one H200, device memory alone. The paper finds up to "
        "2× and 2.9× at the largest pages.",
        "",
        *table(head, lines),
        "",
    ]


def _copies(rows: list[Part]) -> list[str]:
    lines = [
        [
            row["hardware"],
            row["page_size"],
            row["per_page_ms"],
            percent(row["per_page_share"]),
            row["assisted_ms"],
            percent(row["assisted_share"]),
        ]
        for row in rows
    ]
    head = ["link", "page size", "page by page, ms", "of the link", "GPU-assisted, ms", "of the link"]
    return [
        "### Figure 3: loading 8,192 tokens of Llama-3.1-8B",
        "",
        "This is the link's model, which was made to have the paper's 22%, 5% and 75 to 80%; it reproduces nothing, "
        "but everything below rests on it. `python -m bench.gpu.movers` would measure it on a GPU.",
        "",
        *table(head, lines),
        "",
    ]


def _panels(results: Part) -> list[str]:
    lines: list[list[object]] = []
    for model, curves in results["loogle"].items():
        for name, rows in curves.items():
            cells = ", ".join(
                f"{row['output_tokens_per_s']:.0f} at {row['ttft_ms'] / 1e3:.2f} s ({row['rate']:g}/s)" for row in rows
            )
            over = best_at_same_ttft(rows, curves["HiCache"])
            same = f"{times(over[0])} at {over[1] / 1e3:g} s" if over else "never the same"
            peaked = times(ratio(peak(rows), peak(curves["HiCache"])))
            lines.append([model, name, cells, _hit(rows[-1]), peaked, same])
    head = ["model", "", "output tokens/s at mean TTFT (rate)", "hits at the highest rate", "peak over HiCache"]
    return [
        "### Figure 8: models and datasets",
        "",
        "LooGLE; the 70B model is on four H200, and Qwen2.5-14B is in Figure 9. The last columns compare peaks, and "
        "throughput where both curves have the same TTFT:",
        "",
        *table([*head, "at the same TTFT, at most"], lines),
        "",
        "The other datasets. ReviewMT and NarrativeQA with 128 always in flight, from a cold start (for NarrativeQA "
        "the paper warms host memory first, and says that without it results are like LooGLE's, 5.2.2); ShareGPT "
        "with 8 conversations a second, and 100 thousand tokens on the device for 800 of them, so that they leave it "
        "(the paper has 500 thousand for many more, 5.1):",
        "",
        *_others(results),
        "",
    ]


def _others(results: Part) -> list[str]:
    lines: list[list[object]] = []
    for title, part in (("ReviewMT", "reviewmt"), ("NarrativeQA", "narrativeqa"), ("ShareGPT", "sharegpt")):
        for model, rows in results[part].items():
            for name, row in rows.items():
                over = ratio(row["output_tokens_per_s"], rows["HiCache"]["output_tokens_per_s"])
                cells = [row["output_tokens_per_s"], times(over), row["ttft_ms"], _hit(row), percent(stall_share(row))]
                lines.append([title, model, name, *cells])
    head = ["dataset", "model", "", "output tokens/s", "over HiCache", "mean TTFT, ms", "hits", "stalled"]
    return table(head, lines)


def _hit(row: Row) -> str:
    return percent(row["device_hit_ratio"] + row["host_hit_ratio"])


def _page_sizes(rows: dict[str, Row]) -> list[str]:
    best = rows[SMALL_PAGES]["output_tokens_per_s"]
    lines = [
        [
            name,
            row["output_tokens_per_s"],
            percent(row["output_tokens_per_s"] / best),
            f"{percent(row['device_hit_ratio'])} + {percent(row['host_hit_ratio'])}",
        ]
        for name, row in rows.items()
    ]
    return [
        "### Figure 10: page sizes",
        "",
        "LooGLE on Qwen2.5-14B, peak throughput of HiCache by page size, of that of GPU-assisted copies of pages of 32 "
        "(in the paper of 1). The paper's best is 93% at 512 tokens, with 2.4% less hits.",
        "",
        *table(["", "output tokens/s", f"of {SMALL_PAGES}", "device + host hits"], lines),
        "",
    ]


def _links(found: dict[str, Row]) -> list[str]:
    lines = [
        [name, row["ttft_ms"] / 1e3, row["output_tokens_per_s"], row["sustained_gb_s"], percent(stall_share(row))]
        for name, row in found.items()
    ]
    return [
        "### Figures 13 and 14: a faster link",
        "",
        "Llama-3.1-8B on LooGLE at 6 requests a second. The bandwidth of loads follows from the link's model; the "
        "oracle's link takes no time.",
        "",
        *table(["", "mean TTFT, s", "output tokens/s", "loads, GB/s", "stalled"], lines),
        "",
    ]
