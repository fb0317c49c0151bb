"""Llamas of real geometries with random weights, made on the device: speed does not depend on what they say."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu import reading
from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.model_loading import expected_windows, max_context_tokens
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import find_planes
from services.worker.kv.device_pool import DevicePool

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
"""Llama-3.1-8B."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

SHALLOW_LAYERS = 4
"""Of a quick run."""


def llama_config(shape: dict[str, int], most_tokens: int) -> Any:
    return LlamaConfig(**{"max_position_embeddings": most_tokens, "vocab_size": 32_000, **shape})


def random_runner(
    shape: dict[str, int], *, most_tokens: int, pool_tokens: int, page_size: int, device: torch.device
) -> ModelRunner:
    """A Llama of this shape, in bfloat16 on a GPU and float32 elsewhere, that knows ``most_tokens`` positions, over a
    pool of ``pool_tokens`` tokens.
    """
    config = llama_config(shape, most_tokens)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    model.eval().requires_grad_(False)
    geometry = find_planes(model, expected_windows(config), page_size, max_context_tokens(config)).geometry
    pool = DevicePool.create(geometry, pool_tokens // page_size, device=device, shm_prefix=reading.PREFIX)
    return ModelRunner(model, pool, vocab_size=config.vocab_size)


def weight_bytes(runner: ModelRunner) -> int:
    """What a decode step reads of the weights at the least: all but the rows of the embedding that it does not need."""
    tables = {id(runner.model.get_input_embeddings().weight)}
    return sum(each.nbytes for each in runner.model.parameters() if id(each) not in tables)
