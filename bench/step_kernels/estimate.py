"""Estimate a decode step of Llama-3.1-8B on an H200: ``python -m bench.step_kernels.estimate``. Needs no GPU.

Nothing here is measured on one. Kernels are counted (:mod:`bench.step_kernels.counting`), bytes and operations follow
from the configuration; what a kernel costs besides its bytes, and what share of the memory's rate products reach, are
assumptions, of which there is a kind and an unkind one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import results_file
from bench.step_kernels.counting import counting
from bench.step_kernels.steps import count_around, count_captured, runner_of
from services.worker.engine.fused.choice import ForwardPath

PEAK_BYTES_PER_S = 4.8e12
"""H200: HBM3e, as its data sheet has it."""
PEAK_FLOPS = 989e12
"""H200: dense bfloat16, as its data sheet has it."""

PATHS: tuple[ForwardPath, ...] = ("portable", "fused")

CONTEXT = 1024
"""Tokens behind each decoding request."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """``share`` of the peak rate that a step reaches in what it reads; ``kernel_us`` that each kernel of a graph costs
    besides; ``host_us`` between two steps, and for each request of them.
    """

    share: float
    kernel_us: float
    host_us: float
    request_us: float


ASSUMPTIONS = {
    "kind": Assumption(share=0.85, kernel_us=1.0, host_us=150, request_us=7),
    "unkind": Assumption(share=0.70, kernel_us=2.0, host_us=300, request_us=10),
}


def llama_3_1_8b() -> LlamaConfig:
    """Its sizes; weights are never made."""
    return LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip


def kernels_of(forward: ForwardPath, rows: int, config: LlamaConfig) -> int:
    """Kernels of a captured decode step whose keys are split, counted."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with counting() as counter:
        step = count_captured(counter, runner_of(model, forward), rows, 2 * CONTEXT)
    if not step.can_be_captured:
        raise ValueError(f"the step cannot be captured: {step}")
    return step.kernels


def kernels_around(rows: int, config: LlamaConfig) -> int:
    """Kernels of a captured step that are in no graph, counted up to the read of greedy tokens."""
    with counting() as counter:
        step = count_around(counter, rows, config.vocab_size)
    if not step.read:
        raise ValueError("the step ends without its tokens being read")
    return step.kernels


def step_bytes(config: LlamaConfig, rows: int, context: int) -> int:
    """What a decode step reads and writes in device memory at least: weights, KV, and logits in fp32 four times."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * inner + 2 * hidden
    weights = config.num_hidden_layers * layer + hidden * config.vocab_size + hidden
    kv = rows * context * config.num_hidden_layers * 2 * kv_heads * width
    return int(2 * (weights + kv) + 4 * 4 * rows * config.vocab_size)


def step_flops(config: LlamaConfig, rows: int, context: int) -> int:
    """Multiplications and additions of its products."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * inner + 2 * context * heads * width
    return int(2 * rows * (config.num_hidden_layers * layer + hidden * config.vocab_size))


def estimate(kernels: int, nbytes: int, rows: int, assumed: Assumption) -> dict[str, float]:
    """Milliseconds of a step by what takes them, one after the other, and tokens per second of all requests."""
    memory = nbytes / (PEAK_BYTES_PER_S * assumed.share) * 1e3
    launches = kernels * assumed.kernel_us / 1e3
    host = (assumed.host_us + rows * assumed.request_us) / 1e3
    total = memory + launches + host
    return {
        "memory_ms": memory, "kernels_ms": launches, "host_ms": host, "step_ms": total,
        "tokens_per_s": rows / total * 1e3, "tokens_per_s_overlapped": rows / (memory + launches) * 1e3,
    }  # fmt: skip


def main() -> None:
    """Write ``bench/results/gpu_step.json``."""
    parser = results_file.arguments(__doc__, "--out")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    config, cases = llama_3_1_8b(), []
    for rows in (1, 64):
        nbytes, flops = step_bytes(config, rows, CONTEXT), step_flops(config, rows, CONTEXT)
        bound_s = max(nbytes / PEAK_BYTES_PER_S, flops / PEAK_FLOPS)
        around = kernels_around(rows, config)
        for forward in PATHS:
            kernels = kernels_of(forward, rows, config)
            times = {name: estimate(kernels, nbytes, rows, each) for name, each in ASSUMPTIONS.items()}
            cases.append({
                "rows": rows, "forward": forward, "kernels": kernels, "around": around, "bytes": nbytes, "flops": flops,
                "bound_tokens_per_s": rows / bound_s, **times,
            })  # fmt: skip
            print(cases[-1])
    results = {
        "is_estimate": True, "context": CONTEXT, "peak_bytes_per_s": PEAK_BYTES_PER_S, "peak_flops": PEAK_FLOPS,
        "assumptions": {name: asdict(each) for name, each in ASSUMPTIONS.items()}, "cases": cases,
    }  # fmt: skip
    print(results_file.write("gpu_step", results, seed=0, out=options.out))


if __name__ == "__main__":
    main()
