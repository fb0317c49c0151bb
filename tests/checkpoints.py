"""Tiny random checkpoints of every proven model family, complete with tokenizer, as tests need them.

They are real: sharded safetensors, config.json, generation_config.json, tokenizer.json with a chat template.
The weights are wider than usual so that greedy answers wander instead of repeating one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GenerationConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)
from transformers.utils import logging as transformers_logging

SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS = 0, 1, 2
VOCAB_SIZE = 300
MAX_POSITIONS = 2048
SLIDING_WINDOW = 24

_MERGES = """
    t h,th e,Ġ the,i n,a n,e r,o n,r e,a t,e n,Ġ a,Ġ t,Ġ s,Ġ w,o r,e s,i s,i t,o u,Ġ o,n d,in g,Ġa nd,Ġo f,Ġ in,
    Ġt o,Ġ b,Ġ c,Ġ d,a l,a r,l l,o m,s t,v e,Ġ is,Ġ f,Ġ m
"""
_CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    **_IDS,
}
_GATED = {**_SHAPE, "intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
_WIDE = {"initializer_range": 0.2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_GATED, **_WIDE),
    "llama3": lambda: LlamaConfig(**{**_GATED, "tie_word_embeddings": True}, **_WIDE, rope_parameters=_LLAMA3_ROPE),
    "qwen2": lambda: Qwen2Config(**_GATED, **_WIDE),
    "qwen3": lambda: Qwen3Config(**_GATED, **_WIDE, head_dim=32),
    "mistral": lambda: MistralConfig(**_GATED, **_WIDE, sliding_window=SLIDING_WINDOW),
    "gemma2": lambda: Gemma2Config(
        **{**_GATED, "num_hidden_layers": 4},
        **_WIDE,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=SLIDING_WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    ),
    "opt": lambda: OPTConfig(**_SHAPE, ffn_dim=128, word_embed_proj_dim=64, dropout=0.0, init_std=0.2),
}

FAMILIES = tuple(_CONFIGS)
"""llama3 is Llama with llama3 RoPE scaling and tied embeddings; mistral and gemma2 have sliding windows."""

UNLIKE = ("mla", "gemma4", "gemma4_padded", "mimo")
"""Variants whose pages do not hold K and V of all layers alike."""

_VARIANTS: dict[str, Callable[[], Any]] = {
    "llama_mha": lambda: LlamaConfig(**{**_GATED, "num_key_value_heads": 4}, **_WIDE),
    "gpt_oss": lambda: GptOssConfig(
        **_GATED,
        **_WIDE,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama4": lambda: Llama4TextConfig(
        **_GATED,
        **_WIDE,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        no_rope_layer_interval=3,
        attention_chunk_size=SLIDING_WINDOW,
        floor_scale=16,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **_GATED,
        **_WIDE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "minimax_m3": lambda: MiniMaxM3VLTextConfig(
        **_GATED,
        **_WIDE,
        head_dim=16,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense"] * 3,  # No layer has experts, which round by the number of rows.
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=8,
        index_topk_blocks=3,
    ),
    "bloom": lambda: BloomConfig(
        **{name: _SHAPE[name] for name in ("vocab_size", "hidden_size", *_IDS)},
        **_WIDE,
        n_layer=3,
        n_head=4,
        seq_length=MAX_POSITIONS,
    ),
    "falcon": lambda: FalconConfig(**_SHAPE, **_WIDE, alibi=True, new_decoder_architecture=False, multi_query=True),
    "doge": lambda: DogeConfig(**_GATED, **_WIDE),
    "roberta": lambda: RobertaConfig(
        **{**_SHAPE, "max_position_embeddings": MAX_POSITIONS + 1}, **_WIDE, intermediate_size=96, is_decoder=True
    ),
    "mla": lambda: DeepseekV3Config(
        **{**_GATED, "num_key_value_heads": 4},
        **_WIDE,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=3,  # No layer has experts, which round by the number of rows.
    ),
    "indexed": lambda: GlmMoeDsaConfig(
        **{**_GATED, "num_key_value_heads": 4},
        **_WIDE,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        mlp_layer_types=["dense"] * 3,
        indexer_types=["full", "shared", "full"],
        index_topk=16,
        index_head_dim=16,
        index_n_heads=16,  # With few heads many tokens have the score 0, and which are chosen is left to chance.
    ),
    "gemma4": lambda: _gemma4(global_head_dim=32),
    "gemma4_padded": lambda: _gemma4(global_head_dim=24),
    "mimo": lambda: MiMoV2FlashConfig(
        **_GATED,
        **_WIDE,
        head_dim=24,
        v_head_dim=16,
        sliding_window=SLIDING_WINDOW,
        mlp_layer_types=["dense"] * 3,
    ),
}
"""llama_mha has a K and a V for every query head. gpt_oss has sinks, in every second layer with a window; two of three
layers of llama4 attend in chunks, and the third scales its queries by their position; positions of roberta begin
behind its padding token. bloom and falcon, with ALiBi, and doge attend by code of their own. mla keeps latents in
the place of K and V, and indexed (GLM 5) index keys beside them, by which two of three layers choose 16 tokens;
layers of gemma4 have heads of other sizes, which fill planes, or in gemma4_padded do not, and some share K and V.
mimo has K and V of different sizes, and sinks.
"""


def _gemma4(global_head_dim: int) -> Any:
    return Gemma4TextConfig(
        **{**_GATED, "num_hidden_layers": 6},
        **_WIDE,
        head_dim=16,
        global_head_dim=global_head_dim,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=SLIDING_WINDOW,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=64,
        vocab_size_per_layer_input=VOCAB_SIZE,
    )


def make_checkpoint(family: str, path: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a random checkpoint of ``family``, or of a variant, into ``path`` (made if need be).

    Returns ``path``. The same family, seed and dtype give the same weights.
    """
    config = (_CONFIGS | _VARIANTS)[family]()
    return save_checkpoint(config, path, seed=seed, dtype=dtype)


def save_checkpoint(config: Any, path: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a random checkpoint for any configuration with our vocabulary."""
    path.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(**_IDS)
    model.save_pretrained(path, max_shard_size="128KB")
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer of exactly ``VOCAB_SIZE`` tokens, with a chat template, into ``path``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in _MERGES.split(","))]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    assert len(vocabulary) == len(tokens) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
