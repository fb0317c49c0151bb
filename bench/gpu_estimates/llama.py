"""Bytes and products of Llama-3.1-8B in bfloat16."""

from __future__ import annotations

from bench.defaults_on_gpus import MODELS

LLAMA_8B = next(model for model in MODELS if model.name == "Llama-3.1-8B")


def token_bytes() -> int:
    """KV of a token."""
    return LLAMA_8B.geometry(16).token_bytes


def weight_bytes() -> int:
    """Read by a step at the least: all weights but the embedding, of which it is one row a request."""
    return 2 * (LLAMA_8B.parameters - LLAMA_8B.vocab * LLAMA_8B.hidden)


def logits_bytes(rows: int) -> int:
    """Written and read by a step: logits in fp32, four times."""
    return 4 * 4 * rows * LLAMA_8B.vocab


def product_flop(rows: int, logits: int = 0) -> float:
    """Two operations a weight and row, of the layers; of the head for so many rows."""
    layers = LLAMA_8B.parameters - 2 * LLAMA_8B.vocab * LLAMA_8B.hidden
    return 2.0 * (layers * rows + LLAMA_8B.vocab * LLAMA_8B.hidden * logits)


def attention_flop(rows: int, context: int = 0) -> float:
    """Two products of each visible key and query head."""
    visible = rows * (context + (rows + 1) / 2)
    return 4.0 * LLAMA_8B.layers * LLAMA_8B.heads * LLAMA_8B.head_dim * visible


def layer_products() -> tuple[tuple[int, int], ...]:
    """(columns, sums over) of the four products of a layer: QKV, output, gate with up, down."""
    heads, kv = LLAMA_8B.heads * LLAMA_8B.head_dim, 2 * LLAMA_8B.kv_heads * LLAMA_8B.head_dim
    hidden, inner = LLAMA_8B.hidden, LLAMA_8B.intermediate
    return (heads + kv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)
