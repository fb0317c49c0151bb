"""``docs/results/strata.md`` from committed results: nothing on the page is written by hand but the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.papers import strata_machines_page as machines_page
from bench.papers.claims import TOLERANCE, Claim, claim_table, direction, made_by, percent, ratio, table
from bench.papers.figures import Documents, every_figure
from bench.papers.simulated import Row
from bench.papers.strata_curves import peak, throughput_at
from bench.papers.strata_figures import PAPER, entries

Part = dict[str, Any]

_COMPARED_TTFT_MS = (5_000.0, 10_000.0, 20_000.0)

_PAPER_GAINS = {
    "+ deferral": (0.42, None, 0.0),
    "+ IO": (None, 0.76, 0.95),
    "+ balanced batches": (None, 0.11, 0.12),
    "+ bubble filling": (None, 0.08, 0.03),
}
"""Section 5.3.3, by cache distance min, shuffled, max; None where the text gives no number."""


def render(documents: Documents) -> str:
    """The whole page."""
    document, others = documents["papers_strata"], documents["papers_strata_machines"]
    results = document["results"]
    lines = [
        f"# {PAPER.title}",
        "",
        "Every number here is **simulated**, unless it says measured: the scheduler's own core under virtual time on "
        "modelled hardware ([how](simulator.md)). " + made_by(document),
        "",
        *every_figure(PAPER, entries(documents)),
        *_setting(results),
        *_curves(results["curves"]),
        *_distances(results["distances"]),
        *_bursts(results["bursts"]),
        *machines_page.machines(others["results"], results["curves"], made_by(others)),
        *_what_differs(results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _setting(results: Part) -> list[str]:
    return [
        "## Setting",
        "",
        f"`{results['model']}` on `{results['hardware']}`; LooGLE's shape (Table 1): 105 documents of 21,613 tokens on "
        f"average, {results['queries']:,} questions, 15.6 tokens an answer; at most {results['in_flight']} in flight; "
        f"1 TB of host memory; a cold start. Pages have {results['page_size']} tokens everywhere (the paper's Strata "
        "has 1, its HiCache 32), so that hits are the same and only copying and scheduling differ. Prefill batches "
        f"have {results['prefill_tokens']:,} tokens, which the paper does not say. Stall is what a batch waits for "
        "its loads.",
        "",
    ]


def _curves(curves: dict[str, list[Row]]) -> list[str]:
    rates = [row["rate"] for row in curves["HiCache"]]
    cells = [
        [name, *(f"{row['output_tokens_per_s']:.1f} at {row['ttft_ms'] / 1e3:.1f} s" for row in rows)]
        for name, rows in curves.items()
    ]
    peaks = {name: peak(rows) for name, rows in curves.items()}
    base = peaks["HiCache"]
    claims = [
        (Claim("peak throughput, + schedule / HiCache", 1.8, 1.8), [ratio(peaks["+ schedule"], base)]),
        (Claim("peak throughput, + IO / HiCache", 2.3, 2.3), [ratio(peaks["+ IO"], base)]),
        (Claim("peak throughput, full / HiCache (5.2.1: at the same TTFT)", 3.9, 3.9), [ratio(peaks["full"], base)]),
    ]
    same = [
        [name, *(_throughput_text(rows, curves["HiCache"], limit) for limit in _COMPARED_TTFT_MS)]
        for name, rows in curves.items()
    ]
    return [
        "## Figure 9: throughput against TTFT",
        "",
        "Output tokens a second at mean TTFT, for each Poisson rate:",
        "",
        *table(["", *(f"{rate:g} requests/s" for rate in rates)], cells),
        "",
        *claim_table(["simulated"], claims),
        "",
        "Output tokens a second where a curve crosses a mean TTFT (straight lines between rates), and over HiCache's:",
        "",
        *table(["", *(f"TTFT of {limit / 1e3:g} s" for limit in _COMPARED_TTFT_MS)], same),
        "",
        *_lpm(curves),
        "",
    ]


def _lpm(curves: dict[str, list[Row]]) -> list[str]:
    """The paper's remark on LPM: good at low rates, no gain at high ones, where the full system keeps its own."""
    lines = []
    for plain, lpm, full in zip(curves["+ IO"], curves["+ IO + LPM"], curves["full"], strict=True):
        ratios = [ratio(plain["ttft_ms"], lpm["ttft_ms"]), ratio(plain["ttft_ms"], full["ttft_ms"])]
        ratios.append(ratio(lpm["ttft_p99_ms"], full["ttft_p99_ms"]))
        lines.append(
            [
                f"{plain['rate']:g}",
                *(f"{value:.2f}×" for value in ratios),
                f"{percent(plain['device_hit_ratio'])} / {percent(lpm['device_hit_ratio'])}",
                f"{plain['computed_tokens']:,} / {lpm['computed_tokens']:,}",
            ]
        )
    head = ["requests/s", "TTFT, IO / LPM", "TTFT, IO / full", "p99 TTFT, LPM / full"]
    return [
        "LPM reuses more of what is on the device. The paper finds that its gain over + IO is gone at high rates, "
        "where Strata keeps its own (5.3.1):",
        "",
        *table([*head, "device hits, IO / LPM", "prefill tokens, IO / LPM"], lines),
    ]


def _throughput_text(rows: Sequence[Row], base: Sequence[Row], ttft_ms: float) -> str:
    found, known = throughput_at(rows, ttft_ms), throughput_at(base, ttft_ms)
    if found is None:
        return "above it at every rate"
    return f"{found:.1f}" if not known else f"{found:.1f} ({found / known:.2f}×)"


def gains(rows: dict[str, Row]) -> dict[str, tuple[float, float]]:
    """For each step of Figure 11, what it adds to peak throughput: over the step before, and over the baseline."""
    names = list(rows)
    base = rows[names[0]]["output_tokens_per_s"]
    return {
        name: (
            ratio(rows[name]["output_tokens_per_s"], rows[before]["output_tokens_per_s"]) - 1,
            (rows[name]["output_tokens_per_s"] - rows[before]["output_tokens_per_s"]) / base,
        )
        for before, name in pairwise(names)
    }


def _distances(distances: dict[str, dict[str, Row]]) -> list[str]:
    found = {distance: gains(rows) for distance, rows in distances.items()}
    lines = []
    for step, numbers in _PAPER_GAINS.items():
        for (distance, steps), paper in zip(found.items(), numbers, strict=True):
            over_before, over_base = steps[step]
            said = "no number" if paper is None else percent(paper)
            lines.append(
                [step, distance, said, percent(over_before), percent(over_base), _same_direction(paper, over_before)]
            )
    cells = []
    for distance, rows in distances.items():
        for name, row in rows.items():
            cells.append(
                [
                    distance,
                    name,
                    row["output_tokens_per_s"],
                    row["ttft_ms"] / 1e3,
                    f"{percent(row['device_hit_ratio'])} + {percent(row['host_hit_ratio'])}",
                    row["computed_tokens"],
                    row["stall_s"],
                    row["bubble_s"],
                ]
            )
    head = [
        "distance",
        "variant",
        "tokens/s",
        "TTFT, s",
        "device + host hits",
        "prefill tokens",
        "stall, s",
        "bubble, s",
    ]
    return [
        "## Figure 11: cache distance",
        "",
        "Questions about a document in a row (min), in random order, or as far apart as can be (max); always as many "
        "in flight as the bound allows. What each switch adds to peak throughput:",
        "",
        *table(["step", "distance", "paper", "over the step before", "of the baseline's", "direction"], lines),
        "",
        *table(head, cells),
        "",
    ]


def _same_direction(paper: float | None, found: float) -> str:
    """Whether a gain of the paper is one here; where it says 0, whether there is none here either."""
    if paper is None:
        return "-"
    if paper == 0:
        return "yes" if abs(found) <= 2 * TOLERANCE else "no"
    return direction([1 + found])


def _bursts(bursts: dict[str, dict[str, Row]]) -> list[str]:
    lines = []
    for rows in bursts.values():
        for name, row in rows.items():
            again = (row["computed_tokens"] - row["least_tokens"]) / row["document_tokens"]
            computed = [row["document_tokens"], name, row["computed_tokens"], f"{1 + again:.2f}"]
            lines.append([*computed, row["ttft_ms"], row["ttft_p99_ms"], row["seconds"]])
    times_computed = "document computed, times"
    head = ["document, tokens", "", "prefill tokens", times_computed, "mean TTFT, ms", "p99 TTFT, ms", "all done, s"]
    return [
        "## A burst on one new document",
        "",
        "32 requests at once whose document nobody has computed yet (4.3.1), with the other parts of Strata on. Its "
        "question, and what the document's last page lacks, each request computes in any case:",
        "",
        *table(head, lines),
        "",
    ]


def _what_differs(results: Part) -> list[str]:
    distances, curves = results["distances"], results["curves"]
    min_rows, rates = distances["min"], [row["rate"] for row in curves["full"]]
    again = min_rows["baseline"]["computed_tokens"] / min_rows["+ deferral"]["computed_tokens"]
    lpm, plain = curves["+ IO + LPM"][-1], curves["+ IO"][-1]
    shuffled = distances["shuffled"]
    return [
        "## What differs from the paper, and why",
        "",
        "- **Magnitudes.** I/O and balanced batches bring more here than in the paper. The model of per-page copies is "
        "one engine that issues a copy for K and V of each page and layer, 3.5 µs "
        "each on top of its bytes (22% of the link at 64 KiB, as the paper measured); the paper's baseline may overlap "
        "some of that. The baseline is stalled for "
        f"{shuffled['baseline']['stall_s'] / shuffled['baseline']['seconds']:.0%} of its time when shuffled, so "
        "whatever shortens loads has much to win. The paper's percentages may be of the baseline's peak or of the step "
        "before; both are given.",
        "- **Balanced batches also raise device hits** "
        f"({percent(shuffled['+ IO']['device_hit_ratio'])} to "
        f"{percent(shuffled['+ balanced batches']['device_hit_ratio'])} when shuffled): what would load is put aside, "
        "so that what is on the device goes first, and requests that were put aside share a load later.",
        "- **Deferral at minimum distance**: without it requests that stand in line behind the first question on a new "
        f"document compute it again, {again:.2f} times the prefill tokens in all. How often depends on the prefill "
        "budget and on how many batches are planned ahead (two), neither of which the paper gives.",
        "- **LPM loses at high rates for another reason than the paper's.** There more frequent evictions are blamed; "
        f"here LPM has more device hits at {rates[-1]:g} requests/s ({percent(lpm['device_hit_ratio'])} against "
        f"{percent(plain['device_hit_ratio'])}), but computes {lpm['computed_tokens'] / plain['computed_tokens']:.2f} "
        "times the tokens: a question on a new document ranks last, so that when its turn comes others on the same "
        "document stand beside it, and without deferral they compute it too (delay hits). With deferral they would "
        "not, but LPM lets the one they wait for starve until their deadline of 30 s lets them all run.",
        "- **TTFT** begins when a request is sent; one that finds all places taken waits at the client before that. "
        "The start is cold, and its first questions on each document weigh in every mean.",
        "- **Bubble filling** decodes; with 15.6 tokens an answer there is little to decode, here as there.",
    ]
