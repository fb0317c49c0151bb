"""The parts of HotPrefix's page about its other machines and models, and about offload time."""

from __future__ import annotations

from typing import Any

from bench.papers.claims import gain, percent, ratio, speedup, table, times
from bench.papers.hotprefix_figures import BASELINES, hits, offload_share, seconds
from bench.papers.simulated import Row, offload_s

Part = dict[str, Any]

_PAPER_OFFLOAD = {"mmlu": (25.66, 0.026), "bbh": (24.8, 0.059), "ceval": (68.28, 0.011), "hellaswag": (27.03, 0.022)}
"""Table 1, and the share of the others' latency (5.2.2)."""

_PAPER_DEVICES = {
    "rtx-3090": ("1.06 to 1.53×", "1.17 to 1.60×"),
    "a30": ("1.08 to 1.24×", "1.16 to 2.25×"),
    "a6000-pcie3": ("1.10 to 1.28×", "1.30 to 1.68×"),
    "a100-40g-sxm4": ("1.18 to 1.40×", "1.58 to 2.27×"),
}
"""5.2.3: hit ratio and latency over the others."""


def offload_time(parts: dict[str, Part], one_in: int) -> list[str]:
    """Table 1."""
    lines = []
    for name, part in parts.items():
        rows = part["rows"]
        spent = offload_s(rows["hotprefix"])
        average = sum(seconds(rows[base]) for base in BASELINES) / len(BASELINES)
        said, share = _PAPER_OFFLOAD[name]
        lines.append([name, f"{said:g} s", f"{spent:.1f} s", percent(share), percent(spent / average)])
    head = ["dataset", "paper", f"here, one question in {one_in}", "of the others' latency, paper", "here"]
    return ["## Table 1: offload time", "", *table(head, lines), ""]


def machines(results: Part, origin: str) -> list[str]:
    """Figures 10 to 12, Gemma and 1.1."""
    return [
        "## Other machines and models",
        "",
        origin
        + f" One question in {results['one_in']}. *Fits* is what 90% of device memory leaves beside the weights; "
        "*half* is what runs and half of all examples, because the paper does not say how much its KV had, and where "
        "all examples fit nothing is ever evicted.",
        "",
        "**Figure 10**: Qwen2-72B on four A6000 (tensor parallel), and **Gemma 9B** on one (5.2.2). HotPrefix over "
        "SGLang-LRU and vLLM; the paper says 1.57 to 2.42× and 1.60 to 2.61× in latency for the first, 1.45 to 1.64× "
        "and 1.58 to 1.91× for the second:",
        "",
        *_compared({"qwen2-72b": results["tensor_parallel"], "gemma-9b": results["gemma"]}),
        "",
        "**Figure 11**: HotPrefix with a copy of Llama-2-13B on each device, time with one over time with more:",
        "",
        *_data_parallel(results["data_parallel"]),
        "",
        f"**Figure 12**: MMLU with Llama-3-8B, {results['device_tokens']:,} tokens of KV on every device; HotPrefix "
        "over SGLang (LRU, LFU, FIFO, 2Q) and vLLM:",
        "",
        *_devices(results["by_device"]),
        "",
        *_naive(results["naive_offloading"]),
        "",
    ]


def _compared(models: dict[str, dict[str, Part]]) -> list[str]:
    lines = []
    for model, found in models.items():
        for dataset, capacities in found.items():
            for capacity, part in capacities.items():
                rows = part["rows"]
                of_hits = [times(gain(rows, "hotprefix", base, hits)) for base in ("lru", "vllm")]
                of_time = [times(speedup(rows, base, "hotprefix", seconds)) for base in ("lru", "vllm")]
                held = percent(rows["lru"]["held_share"])
                lines.append([model, dataset, capacity, part["device_tokens"], held, *of_hits, *of_time])
    head = ["model", "dataset", "", "device tokens", "held", "hits / LRU", "hits / vLLM", "time, LRU /", "time, vLLM /"]
    return table(head, lines)


def _data_parallel(found: dict[str, dict[str, Row]]) -> list[str]:
    counts = [count for count in next(iter(found.values())) if count != "1"]
    lines = [
        [name, f"{seconds(rows['1']):,.0f} s", *(times(ratio(seconds(rows["1"]), seconds(rows[n]))) for n in counts)]
        for name, rows in found.items()
    ]
    return table(["dataset", "1 device", *(f"{count} devices" for count in counts)], lines)


def _devices(found: dict[str, dict[str, Row]]) -> list[str]:
    lines = []
    for device, rows in found.items():
        said_hits, said_time = _PAPER_DEVICES[device]
        of_hits = [gain(rows, "hotprefix", base, hits) for base in BASELINES]
        of_time = [speedup(rows, base, "hotprefix", seconds) for base in BASELINES]
        lines.append([device, said_hits, _range(of_hits), said_time, _range(of_time), percent(hits(rows["hotprefix"]))])
    return table(["device", "hits, paper", "here", "latency, paper", "here", "hit ratio of HotPrefix"], lines)


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {times(max(values))}"


def _naive(row: Row) -> list[str]:
    return [
        "**Section 1.1**: MMLU in batches of 8 on one A6000 with everything that is evicted copied to host memory. The "
        f"paper spent 1,200 of 2,138 s offloading; here copies take {offload_s(row):.0f} s of link time beside "
        f"{seconds(row):.0f} s of everything else, {percent(offload_share(row))} if nothing computes meanwhile."
    ]
