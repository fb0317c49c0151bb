"""Configurations of a few thousand weights for any model type, made from the library's own defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 300
CONTEXT = 256
WINDOW = 24
LAYERS = 2

_LAYER_FIELDS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth"),
    *("num_decoder_layers", "num_encoder_layers", "text_layers", "vision_layers"),
)
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "embed_size", "projection_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 16,
    "attention_head_dim": 16,
    "global_head_dim": 16,
    "query_pre_attn_scalar": 16,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner", "dff", "d_ff"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"), CONTEXT),
    **dict.fromkeys(("max_sequence_length", "max_target_positions", "max_source_positions", "max_length"), CONTEXT),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), WINDOW),
    "floor_scale": 16,  # Positions behind which Llama 4 scales queries, within a prompt.
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 16,  # With few heads many tokens have the score 0, and which are chosen is left to chance.
    "index_head_dim": 16,
    "index_topk": 16,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("image_size", "crop_size"), 28),
    "patch_size": 14,
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(
        ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index"), 3
    ),
    **dict.fromkeys(("boi_token_id", "eoi_token_id", "vision_start_token_id", "vision_end_token_id"), 4),
    "is_decoder": True,
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    "mamba_chunk_size": 16,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "lru_width": 64,
}

_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
_CONVOLVED = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}

# How many pairs of a head's values each of the three positions of a picture's part rotates.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_THREE_POSITIONS = {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
_THREE_OF_HALF = {
    "head_dim": 16,
    "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
}

_OF_TYPE: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(
        (
            *("bailing_hybrid", "granitemoehybrid", "kimi_linear", "olmo_hybrid", "qwen3_next"),
            *("qwen3_5_text", "qwen3_5_moe_text"),
        ),
        _LINEAR,
    ),
    "lfm2": _CONVOLVED | {"block_auto_adjust_ff_dim": False},
    **dict.fromkeys(("lfm2_moe", "lfm3"), _CONVOLVED),
    # Its vocabulary has tokens of pictures and sounds at fixed places, as many as their codebooks have entries.
    "apertus1p5": {"image_token_offset": 262_328},
    "apertus1p5_text": {"vocab_size": 266_440},
    "apertus1p5_vision_tokenizer": {
        **dict.fromkeys(("codebook_size", "embed_dim", "latent_channels"), 16),
        "base_channels": 32,
    },
    "wavtokenizer_encoder": {"hidden_size": 64, "codebook_dim": 64},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64, "expand": 2, "n_groups": 1, "chunk_size": 16},
    "nemotron_h": {"chunk_size": 16, "n_groups": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
        "chunk_size": 16,
        "mamba_headdim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note": {"per_layer_config": None},
    "dots3_note_text": {"layer_types": ["indexed_attention", "sliding_attention"], "num_hidden_layers": 2},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), _THREE_POSITIONS),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text"), _THREE_OF_HALF),
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "num_hidden_layers": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1,
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "head_dim": 32,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,  # With few heads many entries have the score 0, and which are chosen is left to chance.
        "index_head_dim": 16,
        "index_topk": 4,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "num_hidden_layers": 2,
        "mlp_layer_types": ["sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    "inkling_text": {"sliding_window_size": 24},
    **{
        name: {"unpadded_vocab_size": VOCAB_SIZE, "sliding_window_size": 24}
        for name in ("inkling2_text", "inkling2_loop_text")
    },
    "mistral4": {
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 8,
        "rope_parameters": _ROPE
        | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale_all_dim": 1.0}
        | {"max_position_embeddings": CONTEXT, "mscale": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "longcat_flash": {"head_dim": 8},
}
"""What single types need besides."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"layers": 4},
    {"layers": 4, "num_key_value_heads": 4},
    {"head_dim": None},
    {"layers": 6},
    {"hidden_size": None, "num_attention_heads": None, "num_key_value_heads": None, "head_dim": None},
)
"""Changes to try in turn, because some types ask for more layers, or for heads that fit together otherwise. None
leaves a field to the library."""


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Configurations of ``model_type`` to try, the smallest first; those that the library refuses are left out.

    Raises the last of its errors where it refuses all.
    """
    error: Exception | None = None
    made = 0
    for variant in VARIANTS:
        try:
            config = _tiny(CONFIG_MAPPING[model_type], variant)
        except Exception as refused:
            error = refused
            continue
        made += 1
        yield config
    if not made and error is not None:
        raise error


def _tiny(kind: Any, variant: Mapping[str, Any]) -> Any:
    """``kind`` with small sizes, and its sub-configurations too."""
    default = kind()
    fields = default.to_dict()
    layers = variant.get("layers", LAYERS)
    sizes = {name: value for name, value in _SIZES.items() if name in fields or name in kind.attribute_map}
    sizes |= {name: layers for name in _LAYER_FIELDS if name in fields or name in kind.attribute_map}
    for name, value in variant.items():
        if name in sizes:
            if value is None:
                sizes.pop(name)
            else:
                sizes[name] = value
    # A name and the one that it stands for must not be given both.
    sizes = {
        name: value
        for name, value in sizes.items()
        if kind.attribute_map.get(name, name) == name or (kind.attribute_map[name] not in sizes)
    }
    kept = {name: value for name, value in sizes.items() if not _is_unset(fields, name)}
    for name in kind.sub_configs:
        made = getattr(default, name, None)
        if made is not None and hasattr(type(made), "model_type") and type(made) in CONFIG_MAPPING.values():
            kept[name] = _tiny(type(made), variant).to_dict()
    return kind(**{**kept, **_OF_TYPE.get(kind.model_type, {})})


def _is_unset(fields: Mapping[str, Any], name: str) -> bool:
    """Whether the library leaves this size open, such as a window that a type has no use for."""
    return name in ("sliding_window", "window_size", "n_inner", "q_lora_rank", "num_local_experts") and (
        fields.get(name) is None
    )
