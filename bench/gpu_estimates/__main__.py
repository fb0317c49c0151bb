"""Usage: ``python -m bench.gpu_estimates`` (writes bench/results/gpu_estimates.json, or ``--out``). Needs no GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench import results_file
from bench.gpu_estimates import batch, one_request, overlap, pages, prompts, shared_document, transfers, vllm_step
from bench.gpu_estimates.rows import devices
from bench.gpu_estimates.table import evidence, table
from bench.gpu_estimates.targets import TARGETS
from services.worker.kernels import page_gather


def assumed() -> dict[str, Any]:
    """What is neither counted nor on a data sheet."""
    return {
        "kernel_us": one_request.KERNEL_US,
        "host_us": one_request.HOST_US,
        "kind": one_request.KIND,
        "unkind": one_request.UNKIND,
        "memory_latency_us": one_request.MEMORY_LATENCY_US,
        "link_latency_us": transfers.LINK_LATENCY_US,
        "tile_bytes": 4 * page_gather.TILE_WORDS,
        "tiles_ahead": {device.name: device.tiles_ahead for device in devices()},
        "batch": asdict(batch.LIKELY),
        "batch_ranges": batch.RANGES,
        "behind": batch.BEHIND,
        "cache_rate": shared_document.CACHE,
        "launches_us": batch.LAUNCHES_US,
        "read_us": overlap.READ_US,
        "wake_us": overlap.WAKE_US,
        "prefill_products": prompts.PRODUCTS,
        "prefill_attention": prompts.ATTENTION,
    }


def vllm() -> dict[str, Any]:
    """Launches of its step."""
    launches = {"layer": vllm_step.LAYER, "around": vllm_step.AROUND}
    return {"version": vllm_step.VERSION, "kernels": vllm_step.kernels()} | {
        name: [asdict(each) for each in some] for name, some in launches.items()
    }


def main() -> None:
    options = results_file.arguments(__doc__, "--out").parse_args()
    rows = table(evidence(results_file.RESULTS / "gpu.json"), results_file.RESULTS)
    for row in rows:
        ends = "" if row.low is None or row.high is None else f"({row.low:.4g} to {row.high:.4g})"
        print(f"{row.device}: {row.what}: {row.estimate:.4g} {ends} {row.unit} {row.aim}")
    results = {
        "assumed": assumed(),
        "vllm": vllm(),
        "transfers": pages.transfers(),
        "aims": [asdict(each) for each in TARGETS],
        "rows": [asdict(row) for row in rows],
    }
    results_file.write("gpu_estimates", results, seed=0, out=options.out)


if __name__ == "__main__":
    main()
