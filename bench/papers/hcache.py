"""HCache's Table 3 and Figures 1, 4, 9 to 13 and 15 by the planner's cost model on modelled hardware (its 3.2, 4.1, 6).

What is computed: times of a layer from profiles (:mod:`bench.papers.hcache_platform`), the planner's partition from
them, and the layers one after another with their bubbles. Nothing is fitted to the paper's figures.

``python -m bench.papers.hcache [--seed N] [--json]``; it writes ``bench/results/papers_hcache.json`` and takes
some minutes, nearly all of them for Figure 9; ``python -m tools.reference_docs`` then makes the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import ceil
from typing import Any

from bench import results_file
from bench.papers.hcache_platform import Platform, pipelined_us, speed
from bench.papers.hcache_queue import METHODS as QUEUE_METHODS
from bench.papers.hcache_queue import serve
from bench.papers.hcache_reuse import reuse
from bench.papers.hcache_ttft import balanced, resources, ttft
from services.scheduler.core.hidden.partition import (
    LayerCosts,
    LayerTimes,
    Partition,
    best_partition,
    best_two_way,
    closed_form,
    hidden_only,
    kv_only,
    naive_hybrid,
    token_wise,
    tokens_only,
)

A100 = "a100-40g-sxm4"
TESTBED = {
    "llama-2-7b": Platform(A100, "llama-2-7b", disks=4),
    "llama-2-13b": Platform(A100, "llama-2-13b", disks=4),
    "opt-30b": Platform(A100, "opt-30b", degree=4, disks=1),
}
"""Models on four devices and four disks (6, testbed)."""

GPUS = {
    "llama-2-7b": [("a30", 1), ("l20", 1), ("4090", 1), (A100, 1), ("h800", 1)],
    "llama-2-13b": [("l20", 1), (A100, 1), ("h800", 1)],
    "opt-30b": [(A100, 4), ("h800", 1)],
}
"""Where the weights fit, with host memory below (6.2.1); which pairs the paper ran only its figures show."""

TOKENS = 1024  # 6.2.2
LENGTHS = (1024, 2048, 4096, 8192, 16_384)  # 6.2.3
DISKS = {"llama-2-7b": (1.0, 2.0, 3.0, 4.0), "llama-2-13b": (1.0, 2.0, 3.0, 4.0), "opt-30b": (1.0, 2.0, 4.0)}
"""Per device; the 30B model has 4, 8 and 16 on four (6.2.2)."""

SETTINGS = {
    "IO-sufficient": Platform("a30", "llama-2-7b"),
    "balanced": Platform(A100, "llama-2-7b", disks=4),
    "compute-sufficient": Platform(A100, "llama-2-7b", disks=1),
}
"""Figure 12's three, which the paper does not define."""

TILE_ROWS, TILE_COLUMNS, MULTIPROCESSORS = 256, 128, 108
"""Of a large matrix product on an A100: the library's usual tile, and how many run at once."""

RATES = {
    "llama-2-7b": (0.2, 0.4, 0.6, 0.8),
    "llama-2-13b": (0.05, 0.1, 0.15, 0.2),
    "opt-30b": (0.25, 0.5, 0.75, 1.0),
}
"""Rounds a second (Figure 9 a-c), up to where requests wait for memory. Those of the paper only its figure shows."""

METHODS: dict[str, Callable[[int, LayerTimes], Partition]] = {
    "tokens": tokens_only,
    "kv": kv_only,
    "hidden": hidden_only,
    "naive": naive_hybrid,
    "hcache": best_two_way,
    "planner": best_partition,
}
"""Recomputation, KV offload, HCache-O, naive hybrid, the paper's two ways, and three ways at once."""


def speeds(platform: Platform, tokens: int) -> dict[str, Any]:
    """Restored tokens a second by method, and what was chosen."""
    times = platform.times(tokens)
    found: dict[str, Any] = {
        name: speed(method(platform.layers, times), times, tokens) for name, method in METHODS.items()
    }
    return found | {"chosen": split(best_partition(platform.layers, times)), "times_us": times_of(times)}


def split(partition: Partition) -> dict[str, int]:
    """Layers by method."""
    return {"tokens": partition.tokens, "hidden": partition.hidden, "kv": partition.kv}


def times_of(times: LayerTimes) -> dict[str, float]:
    """Microseconds, to a tenth."""
    return {name: round(getattr(times, name), 1) for name in times.__slots__}


def storage() -> list[dict[str, Any]]:
    """Table 3: layers and bytes of a token, on the testbed and on each other device with host memory."""
    platforms = list(TESTBED.values())
    for model, gpus in GPUS.items():
        platforms += [Platform(gpu, model, degree) for gpu, degree in gpus]
    rows = []
    for platform in platforms:
        for tokens in (TOKENS, 4096, 16_384):
            times = platform.times(tokens)
            best = best_partition(platform.layers, times)
            rows.append(
                {
                    "hardware": platform.hardware,
                    "model": platform.model,
                    "devices": platform.degree,
                    "disks": platform.disks,
                    "tokens": tokens,
                    "times_us": times_of(times),
                    "formula": split(closed_form(platform.layers, times)),
                    "best": split(best),
                    "kib": (best.hidden * platform.hidden_bytes + best.kv * platform.kv_bytes) / 1024,
                    "kv_kib": platform.layers * platform.kv_bytes / 1024,
                }
            )
    return rows


def by_gpu() -> list[dict[str, Any]]:
    """Figure 11 a-c: host memory, every device."""
    return [
        {"model": model, "hardware": gpu, "devices": degree} | speeds(Platform(gpu, model, degree), TOKENS)
        for model, gpus in GPUS.items()
        for gpu, degree in gpus
    ]


def by_disks() -> list[dict[str, Any]]:
    """Figure 11 d-f: the testbed with fewer or more disks."""
    return [
        {"model": model, "disks": disks} | speeds(Platform(A100, model, TESTBED[model].degree, disks), TOKENS)
        for model, counts in DISKS.items()
        for disks in counts
    ]


def by_length() -> list[dict[str, Any]]:
    """Figure 11 g-i: the testbed with longer histories."""
    return [
        {"model": model, "history": tokens} | speeds(platform, tokens)
        for model, platform in TESTBED.items()
        for tokens in LENGTHS
    ]


def conversations(seed: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Figure 9: TTFT and time between tokens under more and more conversations."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for model, platform in TESTBED.items():
        found[model] = {}
        for method in QUEUE_METHODS:
            found[model][method] = [serve(platform, method, rate, seed) for rate in RATES[model]]
            shown = ", ".join(f"{row['ttft_ms']:.0f} ms at {row['rate']:g}/s" for row in found[model][method])
            print(f"figure 9, {model}, {method:10} {shown}", file=sys.stderr, flush=True)
    return found


def ablation() -> list[dict[str, Any]]:
    """Figure 12: the schedulers under three settings."""
    return [{"setting": name} | speeds(platform, TOKENS) for name, platform in SETTINGS.items()]


def partitions() -> dict[str, Any]:
    """Figure 13: a partition by layers against one by tokens, where products take whole tiles and whole waves."""
    platform = Platform(A100, "llama-2-13b", disks=1)
    times = platform.times(TOKENS)
    by_layer = best_two_way(platform.layers, times)
    costs = LayerCosts(
        layers=platform.layers,
        kv_bytes=platform.kv_bytes,
        hidden_bytes=platform.hidden_bytes,
        hidden_us=times.compute_hidden / TOKENS,
        token_us=times.compute_tokens / TOKENS,
    )
    rate = platform.hidden_bytes * TOKENS / times.io_hidden
    found: dict[str, Any] = {"layers": split(by_layer), "layer_speed": speed(by_layer, times, TOKENS)}
    for name, multiple in (("naive", 1), ("rounded", TILE_ROWS)):
        cut = token_wise(costs, TOKENS, rate, multiple=multiple)
        found[name] = {"hidden": cut.hidden, "tokens": cut.tokens}
        found[f"{name}_speed"] = _token_wise_speed(platform, cut.hidden)
    found["gemm_us"] = {str(rows): round(_waves_us(platform, rows), 1) for rows in range(128, TOKENS + 1, 64)}
    return found


def _waves_us(platform: Platform, rows: int) -> float:
    """K and V of so many rows in whole waves of tiles, of which those of 1024 rows take what the profile says."""
    columns = 2 * platform.model_profile.kv_heads * platform.model_profile.head_dim // TILE_COLUMNS

    def waves(count: int) -> int:
        return ceil(ceil(count / TILE_ROWS) * columns / MULTIPROCESSORS)

    return platform.hidden_us(TOKENS) * waves(rows) / waves(TOKENS)


def _token_wise_speed(platform: Platform, hidden: int) -> float:
    """Every layer: hidden states of the first tokens, the others computed, in rows of whole tiles."""
    others = TOKENS - hidden
    padded = ceil(others / TILE_ROWS) * TILE_ROWS
    computing = _waves_us(platform, hidden) + (platform.tokens_us(padded) if others else 0.0)
    every = Partition(tokens=0, hidden=platform.layers, kv=0, io_us=0.0, compute_us=0.0)
    times = LayerTimes(
        io_kv=0.0,
        io_hidden=platform.read_us(platform.hidden_bytes, hidden),
        compute_hidden=computing,
        compute_tokens=0.0,
    )
    return TOKENS / pipelined_us(every, times) * 1e6


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--json", action="store_true", help="print the results, write nothing")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "simulated": True,
        "tokens": TOKENS,
        "storage": storage(),
        "by_gpu": by_gpu(),
        "by_disks": by_disks(),
        "by_length": by_length(),
        "ablation": ablation(),
        "partitions": partitions(),
        "ttft": ttft(TESTBED, options.seed),
        "resources": resources(TESTBED),
        "balanced": balanced(TESTBED),
        "conversations": conversations(options.seed),
        "reuse": reuse(TESTBED["llama-2-7b"], options.seed),
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(results_file.write("papers_hcache", results, seed=options.seed))


if __name__ == "__main__":
    main()
