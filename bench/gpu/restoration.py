"""Restoration speed of Llama-2-7B and 13B by method and history, from pinned host memory (HCache figures 9 to 11).

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
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu import reading
from bench.hidden_states import PAGE_SIZE, bench_runner
from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.model_loading import expected_windows
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import find_geometry
from services.worker.kv.device_pool import DevicePool

MODELS = {
    "llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}
LENGTHS = [1024, 2048, 4096, 8192, 16_384]
BANDWIDTHS = [0.0, 24.0, 6.9]
"""GB/s. The paper's testbed reads 6.9 GB/s from each of four SSDs, and 24 together."""

PAPER = {"over KV": 1.93, "over recomputing": 5.73}
"""Best ratios that the paper states (abstract)."""


def random_llama(shape: dict[str, int], tokens: int) -> ModelRunner:
    """A Llama of this shape with random weights on the GPU, and room for a prefix of ``tokens`` tokens."""
    config = LlamaConfig(vocab_size=32_000, max_position_embeddings=max(LENGTHS) + PAGE_SIZE, **shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    geometry = find_geometry(model, expected_windows(config), PAGE_SIZE)
    pool = DevicePool.create(geometry, tokens // PAGE_SIZE, device="cuda", shm_prefix=reading.PREFIX)
    return ModelRunner(model, pool, vocab_size=config.vocab_size)


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


def main() -> None:
    options = reading.begin(__doc__)
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    results: dict[str, Any] = {"paper": PAPER, "models": {}}
    for name, shape in MODELS.items():
        of_size = shape | {"num_hidden_layers": 4} if options.quick else shape
        measured = bench_runner(random_llama(of_size, max(lengths)), lengths, BANDWIDTHS, options.rounds)
        results["models"][name] = {
            "layers": of_size["num_hidden_layers"],
            "ratios": ratios(measured["figures"]),
        } | measured
        torch.cuda.empty_cache()
    reading.finish("restoration", options, results)


if __name__ == "__main__":
    main()
