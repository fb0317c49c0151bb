"""Kernels of vLLM's decode step of Llama-3.1-8B in bfloat16 on Hopper, counted by reading vLLM 0.32.0.

As it comes: Inductor compiles what lies between attention (``-cc.custom_ops=none`` is the default there), CUDA graphs
hold whole decode steps, FlashAttention-3 attends, and the scheduler runs a step ahead of the device
(``async_scheduling``). Where reading does not decide whether two operators share a launch, both counts stand.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu_estimates.llama import LLAMA_8B

VERSION = "0.32.0"


@dataclass(frozen=True, slots=True)
class Launches:
    """How often something is launched: ``fewest`` to ``most`` times. ``where`` is the file of vLLM that says so."""

    what: str
    fewest: int
    most: int
    where: str


LAYER = (
    Launches("sum and norm before attention", 1, 1, "model_executor/layers/layernorm.py"),
    Launches("product for queries, keys and values", 1, 1, "model_executor/models/llama.py"),
    Launches("rotation of queries and of keys", 1, 2, "config/compilation.py"),  # One, if combo kernels join them.
    Launches("keys and values into their pages", 1, 1, "v1/attention/backends/flash_attn.py"),
    Launches("attention, and the join of its splits", 1, 2, "v1/attention/backends/flash_attn.py"),
    Launches("product of attention's output", 1, 1, "model_executor/models/llama.py"),
    Launches("sum and norm before the feed-forward part", 1, 1, "model_executor/layers/layernorm.py"),
    Launches("product for gate and up", 1, 1, "model_executor/models/llama.py"),
    Launches("activation", 1, 1, "model_executor/layers/activation.py"),
    Launches("product for down", 1, 1, "model_executor/models/llama.py"),
)
"""Of each layer. In a layer's keys and values nothing is fused with their rotation: that pass is for ROCm."""

AROUND = (
    Launches("embedding", 0, 1, "model_executor/models/llama.py"),  # None, if it is part of the first norm.
    Launches("last sum and norm", 1, 1, "model_executor/models/llama.py"),
    Launches("rows whose logits are wanted, and the head", 2, 2, "model_executor/models/llama.py"),
    Launches("positions, lengths and last tokens", 2, 3, "v1/worker/gpu/input_batch.py"),
    Launches("block tables and slots", 2, 3, "v1/worker/gpu/block_table.py"),
    Launches("schedule of attention, copied to where a graph reads it", 2, 3, "v1/attention/backends/flash_attn.py"),
    Launches("choice of tokens", 2, 5, "v1/worker/gpu/sample/sampler.py"),
    Launches("what a step leaves to the next", 1, 2, "v1/worker/gpu/input_batch.py"),
)
"""Once in a step."""


def kernels() -> tuple[int, int]:
    """Fewest and most of a decode step."""
    return (
        LLAMA_8B.layers * sum(each.fewest for each in LAYER) + sum(each.fewest for each in AROUND),
        LLAMA_8B.layers * sum(each.most for each in LAYER) + sum(each.most for each in AROUND),
    )
