"""A Llama checkpoint as a GGUF file: its weights in bfloat16, or rounded by GGUF's own rules, and a vocabulary to show
tokens with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

from bench.peers.gguf_layout import gguf_name, interleaved, merges, vocabulary


def write_gguf(model: Path, out: Path, kind: str = "BF16") -> Path:
    """Write ``out`` from the Hugging Face folder ``model``, with matrices of this type; where that is a quantised one,
    the embedding has eight bits, as no type of less is used for it. Raises ValueError for what is no plain Llama.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{model.name} is a {config['model_type']}, and only a Llama is written as GGUF here")
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(out, "llama")
    _write_shape(writer, config, kind)
    _write_vocabulary(writer, config, tokenizer)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping.
                weight = tensors.get_tensor(name)
                for part, count in heads.items():
                    if f".{part}." in name:
                        weight = interleaved(weight, count)
                is_embedding = "embed_tokens" in name and kind != "BF16"
                _write_tensor(writer, gguf_name(name), weight, "Q8_0" if is_embedding else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any], kind: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope of type {rope['rope_type']} is not written as GGUF here")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    texts, kinds = vocabulary(tokenizer, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges(tokenizer))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def _write_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor, kind: str) -> None:
    """Matrices of bfloat16 stay so to the bit; llama.cpp wants the weights of norms in float32."""
    if weight.dim() == 1:
        writer.add_tensor(name, weight.float().numpy())
        return
    raw_type = gguf.GGMLQuantizationType[kind]
    if kind == "BF16":
        raw = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    else:
        raw = gguf.quants.quantize(weight.float().numpy(), raw_type)
    writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=raw_type)
