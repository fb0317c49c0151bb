"""What HotPrefix's page says beyond ratios of its results: HotPrefix, SIGMOD 2025."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thermocline.simulate.profiles import load_hardware, load_model


def derived(results: Any) -> Any:
    """Add to every simulated run what the paper counts: ``offload_s``, its share of the time, and ``blocking_s``.

    ``offload_s`` is link time of copies between device and host (5.1). ``blocking_s`` are the run's seconds if nothing
    computed during a backup, which is how the paper counts latency; promotions run beside decoding there, too.
    """
    if not isinstance(results, dict):
        return results
    found = {name: derived(value) for name, value in results.items()}
    if "backup_s" in found:
        found["offload_s"] = found["backup_s"] + found["promotion_s"] + found["load_s"]
        found["offload_share"] = found["offload_s"] / (found["seconds"] + found["offload_s"])
        found["blocking_s"] = found["seconds"] + found["backup_s"]
    return found


def prefill_share(hardware: str, model: str, row: Mapping[str, Any]) -> float:
    """Estimate the part of a run that its prefill tokens take, at 62% of the device's peak for each."""
    device, profile = load_hardware(hardware), load_model(model)
    flop = 2.0 * profile.layer_parameters * row["computed_tokens"]
    peak = device.compute.peak_tflops[profile.dtype] * 1e12 * device.compute.efficiency[-1][1]
    return float(min(1.0, flop / peak / row["seconds"]))


def offload_over_others(datasets: Iterable[Mapping[str, Any]], others: Sequence[str]) -> list[float]:
    """Divide HotPrefix's offload time by the average time of the others, for each dataset (5.2.2)."""
    return [
        rows["hotprefix"]["offload_s"] / statistics.fmean(rows[other]["seconds"] for other in others)
        for rows in datasets
    ]


def live_token_kib(model: str) -> float:
    """KiB of KV that a token of a bundled model takes."""
    return load_model(model).kv_token_bytes / 1024


def over_everything(rows: Iterable[Mapping[str, Any]], name: str, figure: str) -> list[float]:
    """Divide a figure of an arrangement by that with everything admitted, for each workload."""
    return [row[name][figure] / row["all"][figure] for row in rows if row["all"][figure]]


def summary(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Cells of a table: geometric means, extremes and counts of what an arrangement makes of hits, TTFT and copies.

    A workload counts as better or worse where the mean TTFT differs by more than 1%.
    """
    hits, ttft = (over_everything(rows, name, figure) for figure in ("hit_ratio", "ttft_mean_ms"))
    copies = over_everything(rows, name, "backed_up_tokens")
    better, worse = (sum(ratio < 0.99 for ratio in ttft), sum(ratio > 1.01 for ratio in ttft))
    return " | ".join(
        (
            *(f"{_mean(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})" for ratios in (hits, ttft)),
            f"{better} / {worse} of {len(ttft)}",
            f"{_mean(copies):.2f}×",
        )
    )


def _mean(ratios: Sequence[float]) -> float:
    """Average ratios geometrically; those of nothing at all count as one in a thousand."""
    return math.exp(statistics.fmean(math.log(max(ratio, 1e-3)) for ratio in ratios))
