"""The parts of HCache's page about TTFT: alone (Figures 1, 4 and 10, 6.1.3) and among others (Figure 9)."""

from __future__ import annotations

from typing import Any

from bench.papers.claims import ratio, table, times
from bench.papers.hcache_figures import faster_at

Part = dict[str, Any]

_PAPER_BALANCED = {"llama-2-7b": 24, "llama-2-13b": 21, "opt-30b": 37}


def alone(results: Part) -> list[str]:
    """Figures 1, 4 and 10, and the bandwidths of 6.1.3."""
    costs = [
        [row["model"], row["tokens"], times(row["compute"]), times(row["formula"]), times(row["bytes"])]
        for row in results["resources"]
    ]
    cells = [
        [
            row["model"],
            row["task"],
            round(row["tokens"]),
            *(round(row[name]) for name in ("ideal", "recomputed", "kv", "hcache")),
            times(ratio(row["recomputed"], row["ideal"])),
            times(ratio(row["kv"], row["ideal"])),
            times(ratio(row["kv"], row["hcache"])),
            times(ratio(row["recomputed"], row["hcache"])),
        ]
        for row in results["ttft"]
    ]
    head = ["model", "task", "context", "ideal, ms", "recomputed", "KV", "two ways"]
    balanced = [[row["model"], f"{_PAPER_BALANCED[row['model']]} GB/s", row["gb_s"]] for row in results["balanced"]]
    return [
        "## Figures 1, 4 and 10: costs of restoring, and TTFT",
        "",
        "What recomputing computes over what projection does, by the profiles and by the paper's formula (3.2), and "
        "bytes of KV over those of hidden states:",
        "",
        *table(["model", "tokens", "arithmetic", "formula", "bytes"], costs),
        "",
        "TTFT of a request alone on the testbed: its context is restored, then its question computed (6.1.2). Lengths "
        "are drawn around L-Eval's averages (Table 1), at most 16K. The paper says 20.0 to 26.0× and 6.5 to 13.0× for "
        "recomputing and KV over ideal (2.4), and 1.62 to 1.93× and 2.66 to 5.73× over its own:",
        "",
        *table([*head, "recomputed / ideal", "KV / ideal", "KV / two ways", "recomputed / two ways"], cells),
        "",
        "Bandwidth of storage at which transfer takes as long as projection (6.1.3):",
        "",
        *table(["model", "paper", "here, GB/s"], balanced),
        "",
    ]


def conversations(found: dict[str, dict[str, list[Part]]]) -> list[str]:
    """Figure 9."""
    lines = []
    for model, methods in found.items():
        for at, row in enumerate(methods["hcache"]):
            cells = [methods[name][at] for name in ("ideal", "recomputed", "kv", "hcache")]
            lines.append(
                [
                    model,
                    f"{row['rate']:g}",
                    round(row["history_tokens"]),
                    *(round(each["ttft_ms"]) for each in cells),
                    times(faster_at(methods, "kv")[at]),
                    times(faster_at(methods, "recomputed")[at]),
                    *(round(each["tbt_ms"], 1) for each in cells),
                ]
            )
    head = ["model", "rounds/s", "history", "TTFT, ms: ideal", "recomputed", "KV", "two ways", "KV / two ways"]
    head += ["recomputed / two ways", "TBT, ms: ideal", "recomputed", "KV", "two ways"]
    return [
        "## Figure 9: conversations",
        "",
        "One server of the testbed in virtual time, step by step, with ShareGPT4's average lengths, rounds 30 s apart, "
        "and KV dropped after each (6.1.1). A request waits until there is memory for all of it. How lengths spread "
        "and how many rounds a session has is assumed; the paper's rates only its figure shows.",
        "",
        *table(head, lines),
        "",
    ]
