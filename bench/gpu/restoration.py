"""Restoration speed of a 7B with a K and V for each head and an 8B without, by method and history, from pinned host
memory (HCache figures 9 to 11).

Random weights of the real geometries in bfloat16, made on the device: speed does not depend on what they say. Every
restored prefix is compared with the one that was computed before its time counts: recomputed, loaded as KV, projected
from hidden states, the naive half, and the mix that the profile measured in the same run predicts to be fastest.
Bandwidth 0 is the link as it is; the others are token buckets around real copies, as four or one of the paper's SSDs
would give.

``python -m bench.gpu.restoration [--quick] [--rounds 9]``
"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu import reading
from bench.gpu.models import LLAMA_8B, SHALLOW_LAYERS, TINY, random_runner
from bench.hidden_states import PAGE_SIZE, bench_runner

MODELS = {
    "llama-2-7b (MHA)": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-3.1-8b (GQA)": LLAMA_8B,
}  # fmt: skip
"""Hidden states are half as large as KV where every head has a K and a V, and twice as large where four share one."""

TINY_OF = {"llama-2-7b (MHA)": TINY | {"num_key_value_heads": TINY["num_attention_heads"]}, "llama-3.1-8b (GQA)": TINY}

LENGTHS = [1024, 2048, 4096, 8192, 16_384]
BANDWIDTHS = [0.0, 24.0, 6.9]
"""GB/s. The paper's testbed reads 6.9 GB/s from each of four SSDs, and 24 together."""

PAPER = {"over KV": 1.93, "over recomputing": 5.73}
"""Best ratios that the paper states (abstract), of models with a K and V for each head."""


def ratios(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The planner's mix over KV and over recomputing, by length and bandwidth."""
    found = []
    for tokens, bandwidth in sorted({(each["tokens"], each["gb_per_s"]) for each in figures}):
        speed = {
            each["method"]: each["tokens_per_s"]
            for each in figures
            if (each["tokens"], each["gb_per_s"]) == (tokens, bandwidth)
        }
        found.append({
            "tokens": tokens,
            "gb_per_s": bandwidth,
            "over KV": round(speed["best"] / speed["kv"], 3),
            "over recomputing": round(speed["best"] / speed["recompute"], 3),
        })  # fmt: skip
    return found


def headline(models: dict[str, Any]) -> reading.Headline:
    """The best ratios of each model on the link as it is, beside the paper's best."""
    lines: list[tuple[str, float | None, str]] = []
    for name, found in models.items():
        for peer, best in PAPER.items():
            ratio = max(each[peer] for each in found["ratios"] if each["gb_per_s"] == 0)
            lines.append((f"{name}: restored {peer}, best", ratio, f"times (paper, with SSDs: {best})"))
    return lines


def main() -> None:
    run = reading.begin("restoration", __doc__)
    lengths: list[int] = run.choose(LENGTHS, LENGTHS[:2], [64, 128])
    bandwidths = run.choose(BANDWIDTHS, BANDWIDTHS, BANDWIDTHS[:1])
    models: dict[str, Any] = {}
    results: dict[str, Any] = {"paper": PAPER, "models": models}
    for name, shape in run.each(MODELS.items(), lambda each: each[0]):
        of_size = run.choose(shape, shape | {"num_hidden_layers": SHALLOW_LAYERS}, TINY_OF[name])
        runner = random_runner(
            of_size, most_tokens=max(lengths) + PAGE_SIZE, pool_tokens=max(lengths), page_size=PAGE_SIZE,
            device=run.device,
        )  # fmt: skip
        measured = bench_runner(runner, lengths, bandwidths, run.rounds)
        del runner
        layers = of_size["num_hidden_layers"]
        models[run.choose(name, name, f"tiny, not {name}")] = {
            "layers": layers,
            "ratios": ratios(measured["figures"]),
        } | measured
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.keep(results)
    run.finish(results, headline(models))


if __name__ == "__main__":
    main()
