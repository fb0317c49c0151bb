"""The page of how fast the engine and the server are by themselves, and what caching costs where it is of no use."""

from __future__ import annotations

from typing import Any

from tools.result_sections import Result, Section, cost_ratios, sections

_INTRODUCTION = """\
# Speed

Made by `python -m tools.reference_docs` from `bench/results/`. Medians; ratios are medians of neighbouring runs. A CPU
machine with two cores is client, broker and server at once. No GPU was measured yet. Other servers are
[beside ours on a page of their own](peers.md).
"""

_ENGINE = """\
## The engine alone, {dtype}

An 88M-parameter Llama without a server: the fused forward, the portable path, and Hugging Face's `generate`, in one
process with the same weights. Ratios above 1: the fused forward is faster.
"""

_ATTENTION = """\
## Attention of a prefill chunk

One layer over the paged pool: the compiled kernel, the portable path, and one call of torch's attention over keys that
lie in one piece, which is less than either has to do.
"""

_GENERATE = """\
## The server against Hugging Face `generate`, {dtype}

The same model, weights and threads. Ours includes HTTP, broker and scheduler.
"""

_HITS = """\
## TTFT by where the prefix is
"""

_CACHING = """\
## What caching costs where it is of no use: {model}

Prompts that share nothing, asked of cells that keep KV and of one with caching switched off, in turns; ratios to that
one, with the interval that holds 95 % of the medians of resampled rounds. `memory` keeps KV on the device and in host
memory, which is what `thermocline up` does by itself; `everything` writes all of it to a disk as well; `selective` only
what was used twice; `opted_out` has all of that, and requests that decline it. CPU is that of all processes of the
cell, with what is written behind the last answer. Target: at most 2 % of throughput.
"""

_BROKER = """\
## Broker and scheduler in a request's TTFT
"""

_WAITS = """\
## How long OpenMP's threads should wait awake

A cell of its own for every setting, in turns: decode of one and of eight requests, and TTFT of a device hit.
"""


def page(found: dict[str, Result]) -> str:
    """The page, with a section for each of the results that are there."""
    return "\n".join([_INTRODUCTION, *sections(found, _SECTIONS)])


def _engine(figures: dict[str, Any]) -> list[str]:
    limits = figures["limits"]
    products = limits["gflop_per_s"].values()
    reached = {name: [product[name] for product in products] for name in ("onednn", "fused")}
    rows = []
    for name, case in figures["figures"].items():
        times = [f"{case[path]['ms']:,.1f}" for path in ("fused", "portable", "hf")]
        ratios = [f"{case[path]['fused_is_faster']:.2f}" for path in ("portable", "hf")]
        rows.append(f"| {name.replace('_', ' ')} | {' | '.join([*times, *ratios])} |")
    return [
        f"{figures['threads']} threads, {figures['rounds']} rounds. Limits of the machine in the same run: it reads "
        f"{limits['read_gb_per_s']:.0f} GB/s,",
        f"so that a step cannot take less than {limits['reading_weights_ms']:.1f} ms for its weights; linear layers of "
        f"{_rows(limits)}",
        f"rows reach {min(reached['onednn']):,.0f} to {max(reached['onednn']):,.0f} GFLOP/s with oneDNN, and "
        f"{min(reached['fused']):,.0f} to {max(reached['fused']):,.0f} with the fused kernels.",
        "",
        "| case | fused, ms | portable, ms | `generate`, ms | to portable | to `generate` |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _rows(limits: dict[str, Any]) -> int:
    """Rows of the products that were measured."""
    rows: int = next(iter(limits["gflop_per_s"].values()))["shape"][0]
    return rows


def _attention(figures: dict[str, Any]) -> list[str]:
    rows = []
    for dtype, measured in figures["by_dtype"].items():
        for case in measured["cases"]:
            times = [f"{case[name]['ms']:,.2f}" for name in ("native", "portable", "torch")]
            rows.append(
                f"| {dtype} | {case['rows']:,} behind {case['context']:,} | {' | '.join(times)} "
                f"| {case['native']['gflops']:,.0f} | {case['native_faster_by']:.2f} |"
            )
    products = ", ".join(
        f"{measured['product_gflops']:,.0f} GFLOP/s in {dtype}" for dtype, measured in figures["by_dtype"].items()
    )
    return [
        f"A large product of matrices reaches {products}.",
        "",
        "| dtype | tokens | compiled, ms | portable, ms | torch, ms | compiled, GFLOP/s | to portable |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def _generate(figures: dict[str, Any]) -> list[str]:
    rows = ["| case | ours, tok/s | generate, tok/s | ratio | min to max | target |", "|---|---|---|---|---|---|"]
    for name, case in figures["cases"].items():
        least, most = case["ratio_min_max"]
        cells = (
            name.replace("_", " "),
            f"{case['ours_tokens_per_s']:.0f}",
            f"{case['generate_tokens_per_s']:.0f}",
            f"{case['ratio']:.2f}",
            f"{least:.2f} to {most:.2f}",
            f"≥ {case['target']}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _hits(figures: dict[str, Any]) -> list[str]:
    rows = []
    for length, row in figures["by_prompt_tokens"].items():
        cells = [length, *(f"{row['ttft_ms'][source]:.0f}" for source in ("recomputed", "device", "host"))]
        rows.append(f"| {' | '.join(cells)} | {row['device_speedup']:.0f}× | {row['host_speedup']:.0f}× |")
    return [
        "| prompt tokens | recomputed, ms | device, ms | host, ms | device is faster by | host is faster by |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _caching(figures: dict[str, Any]) -> list[str]:
    rows = []
    for load, ways in figures["figures"].items():
        for name, way in ways.items():
            ratios = cost_ratios(way, is_base=name == "off")
            rows.append(f"| {load} | `{name}` | {way['tokens_per_s']:,.0f} | {' | '.join(ratios)} |")
    return [
        f"{figures['rounds']} rounds.",
        "",
        "| load | cell | tokens/s | throughput, ratio | CPU a token, ratio |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _broker(figures: dict[str, Any]) -> list[str]:
    share = figures["broker_and_scheduler_ms"]
    return [
        "From the complete HTTP request to its first step at the worker, one request at a time: "
        f"p50 {share['p50']:.2f} ms, p90 {share['p90']:.2f} ms, p99 {share['p99']:.2f} ms.",
        f"Target: p99 at most {figures['target_p99_ms']:g} ms. A request passes four sockets on this way, and on an "
        "otherwise idle",
        "machine each receiver must be woken first.",
    ]


def _waits(figures: dict[str, Any]) -> list[str]:
    rows = []
    for setting, measured in figures["settings"].items():
        cells = [f"{one['ms']:,.1f} ({one['by_default']:.2f})" for one in measured.values()]
        rows.append(f"| {setting.replace('_', ' ')} | {' | '.join(cells)} |")
    return [
        f"{figures['dtype']}, {figures['rounds']} rounds; beside each the ratio to the default, below 1 is faster.",
        "",
        "| setting | decode of one, ms a token | of eight | TTFT of a device hit, ms |",
        "|---|---|---|---|",
        *rows,
    ]


_SECTIONS: tuple[Section, ...] = (
    *((f"engine_speed_{dtype}", _ENGINE.format(dtype=dtype), _engine) for dtype in ("bfloat16", "float32")),
    ("prefill_attention", _ATTENTION, _attention),
    *((f"serving_vs_generate_{dtype}", _GENERATE.format(dtype=dtype), _generate) for dtype in ("bfloat16", "float32")),
    ("hits_vs_recompute", _HITS, _hits),
    ("caching_cost_generated", _CACHING.format(model="the 88M-parameter Llama"), _caching),
    ("caching_cost", _CACHING.format(model="the bundled model"), _caching),
    ("broker_share", _BROKER, _broker),
    ("thread_waits", _WAITS, _waits),
)

NAMES = tuple(name for name, _, _ in _SECTIONS)
"""Results that the page is made of."""
