"""Tiny random checkpoints of models whose layers carry states, one or two of each kind.

As those of :mod:`tests.checkpoints`: wide weights, so that answers wander, and a real tokenizer. Layers with attention
are among the others where a kind has any.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    BambaConfig,
    DeepseekV4Config,
    FalconH1Config,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    Zamba2Config,
)

from tests.checkpoints import BOS, EOS, MAX_POSITIONS, PAD, SLIDING_WINDOW, VOCAB_SIZE, save_checkpoint

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

_OF_QWEN = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SHAPE,
        **_OF_QWEN,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen4_exp": lambda: Qwen4ExpTextConfig(
        **_SHAPE,
        **_OF_QWEN,
        num_hidden_layers=3,
        layer_types=["linear_attention", "indexed_attention", "linear_attention"],
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
        ple_layer_ids=[1],
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        split_ngram_parts=1,
    ),
    "deepseek_v4": lambda: DeepseekV4Config(
        **{name: value for name, value in _SHAPE.items() if name not in ("intermediate_size", "num_key_value_heads")},
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=SLIDING_WINDOW,
        head_dim=32,
        partial_rotary_factor=0.25,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        hc_mult=2,
    ),
    "bamba": lambda: BambaConfig(**_SHAPE, **_MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    "falcon_h1": lambda: FalconH1Config(**_SHAPE, **_MAMBA, num_hidden_layers=2, mamba_d_ssm=128, head_dim=16),
    "lfm2": lambda: Lfm2Config(
        **_SHAPE, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "zamba2": lambda: Zamba2Config(
        **_SHAPE,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        attention_head_dim=32,
        mamba_d_state=8,
        mamba_headdim=16,
        chunk_size=16,
    ),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **{**_SHAPE, "num_key_value_heads": 1},
        num_hidden_layers=3,
        block_types=["recurrent", "attention"],
        lru_width=64,
        attention_window_size=SLIDING_WINDOW,
        head_dim=16,
        w_init_variance_scale=1.0,
        final_w_init_variance_scale=1.0,
    ),
    "rwkv": lambda: RwkvConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        attention_hidden_size=64,
        intermediate_size=96,
        context_length=MAX_POSITIONS,
        bos_token_id=BOS,
        eos_token_id=EOS,
    ),
    "mamba": lambda: MambaConfig(**_OF_MAMBA, state_size=8),
    "mamba2": lambda: Mamba2Config(
        **_OF_MAMBA, num_heads=8, head_dim=16, state_size=8, expand=2, n_groups=1, chunk_size=16
    ),
}
_OF_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
"""Mamba names no longest context, and a worker would want to be told one."""

STATE_FAMILIES = tuple(_CONFIGS)
"""Linear attention (qwen3_next), state-space models beside layers of attention (bamba), within them (falcon_h1),
with attention that several layers share (zamba2) and alone (mamba, mamba2), short convolutions (lfm2),
modules that keep their states in ways of their own (recurrent_gemma, rwkv), and attention by code of its own beside
states (qwen4_exp) or to compressed blocks (deepseek_v4).
"""


def make_state_checkpoint(family: str, path: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a random checkpoint of ``family`` into ``path``, as :func:`tests.checkpoints.make_checkpoint` does."""
    return save_checkpoint(_CONFIGS[family](), path, seed=seed, dtype=dtype)
